"""KVPatch: the counterfactual "this token's content was another's"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvprobe.engine import Prefix
from kvprobe.errors import InterventionError, quote
from kvprobe.interventions.effects import Swap
from kvprobe.interventions.hooks import Hooked
from kvprobe.interventions.plan import Scene
from kvprobe.interventions.selecting import Keys, Selective, pairs

WHAT = ("kv", "k", "v")


@dataclass(frozen=True, eq=False)
class KVPatch(Selective, Hooked):
    """Let chosen queries find a donor prompt's keys and/or values at chosen positions.

    The donor's keys are taken before rotation and rotated to the positions that they now stand at, so that only content
    changes: ``k' = R(i) R(j)⁻¹ k_donor[j]`` for donor position j and position i. Logits are ``q·k'``, values
    ``V_donor``; everything else of the row is untouched and one softmax runs over all of it.

    Parameters
    ----------
    keys
        Spans or span names of this prompt, in order; they may not overlap.
    donor
        Another prompt's prefilled context: ``kp.prefill(model, donor_prompt)``.
    donor_keys
        Spans of the donor, of the same lengths in the same order, counted in its tokens without left pads; None: the
        same positions (without left pads).
    what
        ``"kv"``, ``"k"`` (where it is looked for) or ``"v"`` (what it says).
    layers, heads, queries
        As in :class:`KVMask`. A head's patch does not touch the other heads that share its kv head.
    name
        Label for tables.

    Raises
    ------
    InterventionError
        When compiled for a prompt that it does not fit.
    CapabilityError
        For keys that move, on a model whose rotation is not one function of the position.
    """

    keys: Keys
    donor: Prefix = field(repr=False)
    donor_keys: Keys | None = None
    what: str = "kv"
    layers: int | Sequence[int] | None = None
    heads: int | Sequence[int] | Mapping[int, Sequence[int]] | None = None
    queries: str | int | Sequence[int] = "suffix"
    name: str | None = None

    def check(self, scene: Scene) -> None:
        """Refuse what cannot be applied to this prompt and model, in one line."""
        if self.what not in WHAT:
            raise InterventionError(f"what={quote(self.what)} is not one of {', '.join(WHAT)}")
        if not isinstance(self.donor, Prefix):
            raise InterventionError(f"donor={quote(self.donor)} is not a prefilled context: give kp.prefill(model, …)")
        self.check_selection(scene)
        here, there = self.given_spans(scene), self._donor_spans(scene)
        lengths = [[stop - start for start, stop in spans] for spans in (here, there)]
        if lengths[0] != lengths[1]:
            raise InterventionError(
                f"keys have lengths {quote(lengths[0])}, donor_keys {quote(lengths[1])}: allowed is the same, in order"
            )
        if sum(lengths[0]) != len({key for span in here for key in range(*span)}):
            raise InterventionError(f"keys={quote(self.keys)} overlap: allowed are spans that do not")
        if len(self.donor.layers) != scene.n_layers:
            raise InterventionError(
                f"the donor has {len(self.donor.layers)} layers, the model {scene.n_layers}: give a context of this "
                "model"
            )
        mine = (scene.n_kv_heads or scene.n_heads, scene.head_dim)
        theirs = tuple(self.donor.layers[0][0].shape[::2])
        if scene.head_dim is not None and theirs != mine:
            raise InterventionError(
                f"the donor's keys are {theirs[0]} kv heads × {theirs[1]}, the model's {mine[0]} × {mine[1]}: give a "
                "context of this model"
            )

    def cuts(self, layer: int, scene: Scene) -> list[Swap]:
        """One swap a span, empty where this patch does not apply."""
        if not self.applies(layer, scene):
            return []
        both = zip(self.given_spans(scene), self._donor_spans(scene), strict=True)
        return [self._swap(layer, here, there, scene) for here, there in both]

    def _swap(self, layer: int, here: tuple[int, int], there: tuple[int, int], scene: Scene) -> Swap:
        keys, values = (part[:, slice(*there)] for part in self.donor.layers[layer])
        columns = torch.arange(*here)
        return Swap(
            columns,
            self.rows(scene, here[1]),
            self.selected_heads(layer),
            self._moved(keys, there, columns, scene) if "k" in self.what else None,
            values if "v" in self.what else None,
        )

    def _moved(self, keys: Tensor, there: tuple[int, int], columns: Tensor, scene: Scene) -> Tensor:
        if there[0] == int(columns[0]):
            return keys
        if scene.move is None:
            raise InterventionError("this scene cannot rotate keys: compile it from a model (model.scene(prompt))")
        return scene.move(keys, torch.arange(*there), columns)

    def _donor_spans(self, scene: Scene) -> list[tuple[int, int]]:
        spans = self.given_spans(scene) if self.donor_keys is None else pairs(self.donor_keys, "donor_keys")
        for start, stop in spans:
            if not 0 <= start < stop <= len(self.donor):
                raise InterventionError(
                    f"donor span ({start}, {stop}) does not fit the donor: allowed is 0 ≤ start < stop ≤ "
                    f"{len(self.donor)}"
                )
        return spans

"""KeepMask: a cache of which every head of every layer holds its own entries, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool
from torch import Tensor

from kvprobe.errors import InterventionError, quote
from kvprobe.interventions.plan import Edit, Rows, Scene
from kvprobe.interventions.selecting import RULES


@dataclass(frozen=True, eq=False)
class KeepMask:
    """Add −∞ to the logits of every entry that an eviction policy does not keep.

    Ragged by nature: each layer and head has its own set. Queries that come later attend as if the evicted entries had
    never been cached (A' = N ⊙ A / R; CriticalKV, arXiv 2502.03805, Theorem 3.2); positions stay absolute, so kept keys
    keep their rotation.

    Parameters
    ----------
    keep : Bool[Tensor, "L J c"]
        True where the entry stays; J is the number of kv heads (what a cache can do) or of query heads (what a mask can
        do). The first c tokens of the prompt (left pads not counted) are the compressed part; all later entries stay.
    queries
        Who sees the loss: ``"after"`` (default) every position after the compressed part, ``"suffix"`` the last
        ``suffix`` prompt tokens and whatever follows, ``"generated"`` only tokens after the prompt.
    name
        Label for tables.

    Raises
    ------
    InterventionError
        When compiled for a model or prompt that ``keep`` does not fit.
    """

    keep: Bool[Tensor, "L J c"]
    queries: str = "after"
    name: str | None = None

    def check(self, scene: Scene) -> None:
        """Refuse what cannot be applied to this prompt and model, in one line."""
        keep = self.keep
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.dim() != 3:
            shown = f"{keep.dtype} {list(keep.shape)}" if isinstance(keep, Tensor) else quote(keep)
            raise InterventionError(f"keep is {shown}; allowed: a boolean tensor [layers, heads, entries]")
        layers, heads, length = keep.shape
        allowed = {scene.n_heads if scene.n_kv_heads is None else scene.n_kv_heads, scene.n_heads}
        if layers != scene.n_layers or heads not in allowed or not 0 < length <= scene.n:
            counts = " (kv) or ".join(map(str, sorted(allowed)))
            raise InterventionError(
                f"keep has shape {list(keep.shape)}; allowed: [{scene.n_layers} layers, {counts} heads, "
                f"1 … {scene.n} entries]"
            )
        if self.queries not in RULES:
            raise InterventionError(f"queries={quote(self.queries)} is not one of {', '.join(RULES)}")
        if self.queries == "suffix" and not scene.suffix:
            raise InterventionError(
                "queries='suffix' needs suffix=…, the number of trailing prompt tokens that run under the mask"
            )

    def cuts(self, layer: int, scene: Scene) -> Sequence[Edit]:
        """One edit for a layer that loses anything."""
        lost = ~self.keep[layer]
        if not bool(lost.any()):
            return ()
        first = {"suffix": scene.n - scene.suffix, "after": self.keep.shape[-1], "generated": scene.n}[self.queries]
        if lost.shape[0] != scene.n_heads:
            lost = lost.repeat_interleave(scene.n_heads // lost.shape[0], 0)
        return (Evicted(lost.cpu(), Rows(first), tuple(range(scene.n_heads))),)


@dataclass(frozen=True, eq=False)
class Evicted:
    """The entries that one layer's heads have lost, [H, c], as an edit of its logits."""

    lost: Tensor = field(repr=False)
    rows: Rows
    heads: tuple[int, ...]
    bias: float = -torch.inf
    on_empty: str = "raise"

    @cached_property
    def columns(self) -> Tensor:
        """Positions that any head has lost."""
        return self.lost.any(0).nonzero().flatten()

    @cached_property
    def _bias(self) -> Tensor:
        lost = self.lost[:, self.columns]
        return torch.zeros(lost.shape).masked_fill_(lost, -torch.inf)

    def alike(self, positions: Tensor) -> bool:
        """See :class:`kvprobe.interventions.plan.Edit`."""
        return self.rows.alike(positions)

    def add_to(self, total: Tensor, columns: Tensor, positions: Tensor) -> None:
        """See :class:`kvprobe.interventions.plan.Edit`."""
        bias = self._bias.to(total.device)[:, None]
        touched = self.rows.touches(positions)
        if not bool(touched.all()):
            bias = torch.where(touched[:, None], bias, 0.0)
        if len(columns) == bias.shape[-1]:  # nothing else in this arm: the columns are ours
            total += bias
        else:
            total[..., torch.searchsorted(columns, self.columns.to(columns.device))] += bias

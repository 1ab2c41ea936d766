"""Inject: an equal blow with other content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvprobe.errors import InterventionError, quote
from kvprobe.interventions.effects import Add
from kvprobe.interventions.hooks import Hooked
from kvprobe.interventions.plan import Scene
from kvprobe.interventions.selecting import Layered, indices

Amount = float | Sequence[float] | Tensor
"""One number, or one a touched row."""


@dataclass(frozen=True, eq=False)
class Inject(Layered, Hooked):
    """Add a vector to the attention output of a layer (to the sum of its heads, projected; before any norm behind it).

    A head's contribution enters that sum, so that adding to a head's projected output is adding to the layer's.

    Parameters
    ----------
    vectors
        Layer → [D], the same at every row, or [R, D], one a touched row in order.
    queries
        ``"suffix"``, ``"generated"`` or explicit positions. [R, D] vectors must be as many as the rows that the run
        touches: its continuation, and the tokens that ``generate`` runs, included. Explicit positions then ascend.
    name
        Label for tables.

    Notes
    -----
    :meth:`of` makes the vectors from a norm and a direction.

    Raises
    ------
    InterventionError
        When compiled for a prompt that it does not fit.
    """

    vectors: Mapping[int, Tensor] = field(repr=False)
    queries: str | int | Sequence[int] = "suffix"
    name: str | None = None
    layers: None = field(default=None, init=False, repr=False)

    @classmethod
    def of(
        cls,
        norm: Amount | Mapping[int, Amount],
        direction: Tensor | Mapping[int, Tensor],
        layers: int | Sequence[int] | None = None,
        *,
        p: int = 1,
        queries: str | int | Sequence[int] = "suffix",
        name: str | None = None,
    ) -> Inject:
        """Vectors of given p-norm (1 or 2) in given directions: ``norm · direction / ‖direction‖_p``.

        ``norm`` is one number or one a touched row, or a mapping by layer; ``direction`` [D] or [R, D], or a mapping by
        layer. ``layers`` are needed where neither is a mapping. Vectors are fp32, or fp64 where the direction is.
        """
        chosen = _layers(norm, direction, layers)
        if isinstance(p, bool) or p not in (1, 2):
            raise InterventionError(f"p={quote(p)} is not allowed: give 1 or 2")
        return cls({layer: _scaled(norm, direction, layer, p) for layer in chosen}, queries, name)

    def check(self, scene: Scene) -> None:
        """Refuse what cannot be applied to this prompt and model, in one line."""
        if not isinstance(self.vectors, Mapping) or not self.vectors:
            raise InterventionError(f"vectors={quote(self.vectors)} is not allowed: give a mapping of layer to vectors")
        self.check_layers(scene, indices("vectors' layers", [*self.vectors]))
        self.check_rows(scene)
        total = scene.n + scene.follow
        touched = int(self.rows(scene).touches(torch.arange(total)).sum())
        for layer, vectors in self.vectors.items():
            _check_vectors(layer, vectors, scene.d_model)
            if vectors.dim() == 2:
                self._check_per_row(layer, vectors.shape[0], touched)

    def cuts(self, layer: int, scene: Scene) -> list[Add]:
        """The addition to one layer, empty where there is none."""
        vectors = {indices("vectors' layers", named)[0]: some for named, some in self.vectors.items()}
        return [Add(self.rows(scene), vectors[layer].detach())] if layer in vectors else []

    def _check_per_row(self, layer: int, given: int, touched: int) -> None:
        if given != touched:
            raise InterventionError(
                f"layer {layer}: {given} vectors for {touched} touched rows; allowed: one [D] for all rows, or one a "
                "row (continuation and generated tokens included)"
            )
        if not isinstance(self.queries, str):
            asked = indices("queries", self.queries)
            if any(a >= b for a, b in pairwise(asked)):
                raise InterventionError(
                    f"queries={quote(self.queries)} with one vector a row; allowed: positions that ascend, each once"
                )


def _check_vectors(layer: int, vectors: Any, d_model: int | None) -> None:
    fits = isinstance(vectors, Tensor) and vectors.dim() in (1, 2) and vectors.is_floating_point()
    if not fits or (d_model is not None and vectors.shape[-1] != d_model):
        shown = f"{vectors.dtype} {list(vectors.shape)}" if isinstance(vectors, Tensor) else quote(vectors)
        width = "D" if d_model is None else d_model
        raise InterventionError(
            f"layer {layer}: vectors are {shown}; allowed: floating point [{width}] or [R, {width}]"
        )
    if not bool(torch.isfinite(vectors).all()):
        raise InterventionError(f"layer {layer}: vectors hold NaN or infinity; allowed: finite numbers")


def _layers(norm: Any, direction: Any, layers: Any) -> tuple[int, ...]:
    named = [set(indices("layers", [*given])) for given in (norm, direction) if isinstance(given, Mapping)]
    if layers is None and not named:
        raise InterventionError("layers=None: give the layers, or norm or direction as a mapping by layer")
    common = set.intersection(*named) if named else set()
    chosen = tuple(sorted(common)) if layers is None else indices("layers", layers)
    missing = sorted(set(chosen) - common) if named else []
    if not chosen or missing:
        raise InterventionError(
            f"layers={quote(layers)}: norm and direction name {quote(sorted(common))} in common; allowed: at least one "
            "layer, each named by both mappings"
        )
    return chosen


def _scaled(norm: Any, direction: Any, layer: int, p: int) -> Tensor:
    amount = norm[layer] if isinstance(norm, Mapping) else norm
    along = direction[layer] if isinstance(direction, Mapping) else direction
    _check_vectors(layer, along, None)
    along = along.detach() if along.dtype == torch.float64 else along.detach().float()
    size = along.norm(p=p, dim=-1, keepdim=True)
    if not bool((size > 0).all()):
        raise InterventionError(
            f"layer {layer}: the direction is 0 in some row; allowed: directions of positive length"
        )
    length = _length(layer, amount, along)
    return (length[:, None] if length.dim() else length) * (along / size)


def _length(layer: int, amount: Any, along: Tensor) -> Tensor:
    """The norm, [] or [R], as many as there are directions where these are one a row."""
    try:
        length = torch.as_tensor(amount, dtype=along.dtype, device=along.device)
    except (TypeError, ValueError, RuntimeError):  # words, None, ragged lists: torch has a kind for each
        length = torch.full((), torch.nan)
    if length.dim() > 1 or not bool((torch.isfinite(length) & (length >= 0)).all()):
        raise InterventionError(f"layer {layer}: norm={quote(amount)}; allowed: finite numbers ≥ 0, one or one a row")
    if length.dim() and along.dim() == 2 and len(length) != len(along):
        raise InterventionError(
            f"layer {layer}: {len(length)} norms for {len(along)} directions; allowed: one norm, or one a direction"
        )
    return length

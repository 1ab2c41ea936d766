"""Where a strength is taken: the chosen layers and heads of a trace, the rows that a mask touches, and the norm."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvprobe.errors import InterventionError, PromptError, quote
from kvprobe.placebo.keysets import KeySet, text
from kvprobe.spans.inputs import Heads, LayerLike, TraceLike, prepare
from kvprobe.theory.checks import check_p

KEPT_BYTES = 256 << 20
"""Attention rows of all layers that a scope keeps between visits."""

Indices = int | Sequence[int] | None
PerLayer = Indices | Mapping[int, Any]


@dataclass(frozen=True)
class Layer:
    """The chosen heads of one layer, ready for sums.

    Attributes
    ----------
    index, numbers
        Layer, and its chosen query heads.
    weight
        What multiplies the layer's term.
    queries
        [Q] absolute positions.
    heads
        Attention and values of the chosen heads.
    m
        [H, 1, k] float64 projected value norms; None where no measure asks for them.
    """

    index: int
    numbers: list[int]
    weight: float
    queries: Tensor
    heads: Heads
    m: Tensor | None

    @cached_property
    def values(self) -> Tensor:
        """[K, k, d] float64."""
        return self.heads.values.double()

    @cached_property
    def output(self) -> Tensor:
        """z = Σ A V, [K, Q, G, d] float64."""
        return self.outputs(self.heads.A)

    @cached_property
    def by_key(self) -> Tensor:
        """A as [k, K, Q·G] float64: the rows of a key side by side, to be picked at once."""
        return self.grouped(self.heads.A).flatten(1, 2).permute(2, 0, 1).contiguous()

    @cached_property
    def single(self) -> Layer:
        """The same with sums in the model's own precision, at least float32."""
        dtype = self.heads.values.dtype
        single = copy(self)
        single.__dict__.update(values=self.heads.values, output=self.output.to(dtype), by_key=self.by_key.to(dtype))
        return single

    def outputs(self, A: Tensor) -> Tensor:
        """Σ A V of rows [H, Q, k], [K, Q, G, d]."""
        rows = A.unflatten(0, (len(self.values), -1))
        return (rows.flatten(1, 2) @ self.values).unflatten(1, rows.shape[1:3]).transpose(1, 2).contiguous()

    def grouped(self, x: Tensor) -> Tensor:
        """[H, Q, ...] as [K, Q, G, ...]: the heads that read one kv head side by side."""
        return x.unflatten(0, (len(self.heads.values), -1)).transpose(1, 2)

    @property
    def norms(self) -> Tensor:
        """m, for a measure that has asked for it."""
        assert self.m is not None
        return self.m


@dataclass(frozen=True)
class _Seen:
    """A layer as it was prepared, with so many keys beside the visible ones."""

    index: int
    numbers: list[int]
    queries: Tensor
    heads: Heads
    margin: int


@dataclass(frozen=True)
class Scope:
    """Layers × heads that a strength sums over, the rows that it averages over, and the norm.

    Attributes
    ----------
    trace
        The clean run.
    layers, heads
        None for all, one index, several; heads also ``{layer: heads}``: as in ``KVMask``.
    p
        1 or 2.
    after
        The rows of a set are those at or after its last stop, not all.
    layer_weights
        One factor a layer, or None.
    norms, known
        What was worked out already and is needed again.
    """

    trace: TraceLike
    layers: Indices = None
    heads: PerLayer = None
    p: int = 1
    after: bool = False
    layer_weights: Any = None
    norms: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not hasattr(self.trace, "layers") or not hasattr(self.trace, "n"):
            raise PromptError(f"{quote(self.trace)} is not a trace: allowed is what kvprobe.observe returns")
        check_p(self.p)
        if self._named == ():
            raise InterventionError(f"layers={quote(self.layers)}, heads={quote(self.heads)} name no layer")
        weights = self._weights
        if weights is not None and (weights.ndim != 1 or not (np.isfinite(weights) & (weights >= 0)).all()):
            raise InterventionError(
                f"layer_weights={quote(self.layer_weights)}; allowed: one finite number >= 0 for each layer"
            )

    def visit(self, *, norms: bool, margin: int = 0) -> Iterator[Layer]:
        """The chosen layers in order; value norms are worked out once a scope, whatever the number of visits.

        So are attention rows, as long as those of all layers take at most 256 MiB.
        """
        seen: list[_Seen] = []
        room = KEPT_BYTES
        for layer in self._kept(margin) or self._seen(margin):
            m = self._norms(layer.index, layer.heads) if norms else None
            yield Layer(layer.index, layer.numbers, self._weight(layer.index), layer.queries, layer.heads, m)
            room -= layer.heads.A.nbytes + layer.heads.visible.nbytes
            seen = [*seen, layer] if room >= 0 else [layer]
        if room >= 0 and seen:
            self.known["layers"] = seen
        if not seen:
            raise InterventionError(
                f"layers={quote(self.layers)}, heads={quote(self.heads)} name no head of this trace; "
                "allowed: at least one"
            )

    def _kept(self, margin: int) -> list[_Seen] | None:
        """The layers of an earlier visit, if those serve this margin, too."""
        kept: list[_Seen] | None = self.known.get("layers")
        n = self.trace.n
        return kept if kept and all(each.margin == margin or each.heads.extent[:2] == (0, n) for each in kept) else None

    def _seen(self, margin: int) -> Iterator[_Seen]:
        for view in self._views():
            numbers = self._numbers(view)
            if numbers:
                yield _Seen(view.index, numbers, view.queries, prepare(_only(view, numbers), margin), margin)

    def rows(self, queries: Tensor, stops: Tensor, named: Sequence[KeySet] | None = None) -> Tensor:
        """Share of each row in a set's average, [Q, P]: 1 / number of touched rows, NaN where there is none.

        With ``named`` sets a set without rows is an error.
        """
        touched = torch.ones(len(queries), len(stops), dtype=torch.bool, device=queries.device)
        if self.after:
            touched = queries[:, None] >= stops.to(queries.device)
        count = touched.sum(0)
        if named is not None and not bool(count.all()):
            lonely = named[int((count == 0).nonzero()[0, 0])]
            raise PromptError(
                f"no observed row follows the set {text(lonely)} (rows end at {int(queries.max())}); "
                "allowed with after=True: sets that end before the last row"
            )
        return touched.double() / count

    @cached_property
    def queries(self) -> Tensor:
        """[Q] rows of the trace."""
        known = getattr(self.trace, "queries", None)
        return next(iter(self.trace.layers())).queries if known is None else torch.tensor(known)

    @cached_property
    def _weights(self) -> np.ndarray | None:
        try:
            return None if self.layer_weights is None else np.asarray(self.layer_weights, dtype=float)
        except (TypeError, ValueError):
            return np.empty((0, 0)) + np.nan

    @cached_property
    def _named(self) -> tuple[int, ...] | None:
        if self.layers is not None:
            return indices("layers", self.layers)
        return indices("heads' layers", [*self.heads]) if isinstance(self.heads, Mapping) else None

    def _views(self) -> Iterator[LayerLike]:
        """Chosen layers; a trace that hands out single layers works out no others."""
        one = getattr(self.trace, "layer", None)
        if self._named is None or one is None:
            yield from (view for view in self.trace.layers() if self._named is None or view.index in self._named)
            return
        count = getattr(self.trace, "n_layers", None)
        for index in sorted({*self._named}):
            if count is not None and not 0 <= index < count:
                raise InterventionError(f"layer {index} does not exist: the trace has layers 0 … {count - 1}")
            yield one(index)

    def _numbers(self, view: LayerLike) -> list[int]:
        count = len(view.w_o)
        if self.heads is None:
            return list(range(count))
        given = self.heads.get(view.index, ()) if isinstance(self.heads, Mapping) else self.heads
        numbers = list(range(count)) if given is None else sorted({*indices("heads", given)})
        for head in numbers:
            if not 0 <= head < count:
                raise InterventionError(f"head {head} does not exist: the trace has heads 0 … {count - 1}")
        return numbers

    def _weight(self, index: int) -> float:
        if self._weights is None:
            return 1.0
        if index >= len(self._weights):
            raise InterventionError(
                f"layer_weights holds {len(self._weights)} numbers, none for layer {index}; allowed: one for each layer"
            )
        return float(self._weights[index])

    def _norms(self, index: int, heads: Heads) -> Tensor:
        key = (index, heads.first, heads.A.shape[-1])
        if key not in self.norms:
            self.norms[key] = heads.value_norms(self.p)
        return self.norms[key].double().unsqueeze(1)


def indices(name: str, given: Any) -> tuple[int, ...]:
    """One whole number or several, of whatever integer type."""
    try:
        return (operator.index(given),)
    except TypeError:
        pass
    try:
        return tuple(operator.index(value) for value in given)
    except TypeError:
        raise InterventionError(f"{name}={quote(given)} is not allowed: give a whole number or several") from None


def _only(view: LayerLike, numbers: list[int]) -> LayerLike:
    """The layer cut down to some query heads. Each then has a kv head of its own, so that h // G stays right."""
    count = len(view.w_o)
    if len(numbers) == count:
        return view
    shared = [head // (count // len(view.values)) for head in numbers]
    return SimpleNamespace(
        index=view.index,
        logits=view.logits[numbers],
        values=view.values[shared],
        w_o=view.w_o[numbers],
        sink=None if view.sink is None else view.sink[numbers],
        queries=view.queries,
    )

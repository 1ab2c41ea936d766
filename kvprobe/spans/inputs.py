"""What the span functions read: a trace, its layers, and half-open spans of keys."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvprobe.errors import PromptError, quote
from kvprobe.theory import attention, projected_norms, value_norms

Span = tuple[int, int]


class LayerLike(Protocol):
    """One layer of a trace. Query head h reads kv head h // (H // K)."""

    @property
    def index(self) -> int:
        """Layer number."""

    @property
    def logits(self) -> Tensor:
        """``[H, Q, n]``, after scale and soft-cap; −inf where the key is invisible to the query."""

    @property
    def values(self) -> Tensor:
        """``[K, n, d]``."""

    @property
    def w_o(self) -> Tensor:
        """``[H, d, D]``, the output projection by query head."""

    @property
    def sink(self) -> Tensor | None:
        """``[H]``, learned sink logits, or None."""

    @property
    def queries(self) -> Tensor:
        """``[Q]``, absolute positions."""


class TraceLike(Protocol):
    """A trace: layers, one at a time, over ``n`` keys."""

    @property
    def n(self) -> int:
        """Number of keys."""

    def layers(self) -> Iterable[LayerLike]:
        """Yield the layers in order."""


@dataclass(frozen=True)
class Heads:
    """One layer ready for sums, cut down to the keys that some query sees (all that a window layer needs).

    ``A`` ``[H, Q, k]`` and ``sink_mass`` ``[H, Q]`` are float64: a span's scalars cost next to nothing, and a sink
    beside them takes all of float32's digits. ``values`` ``[K, k, d]`` and ``w_o`` ``[H, d, D]`` are float32, or
    float64 if the model is.
    """

    first: int
    A: Tensor
    sink_mass: Tensor | None
    visible: Tensor
    values: Tensor
    w_o: Tensor

    @property
    def extent(self) -> tuple[int, int, torch.device]:
        """First key, number of keys, device: layers of equal extent share what depends on the spans alone."""
        return self.first, self.A.shape[-1], self.A.device

    def groups(self) -> list[slice]:
        """Query heads of each kv head: kv head g is read by heads g·G to (g + 1)·G, with G = H // K."""
        G = len(self.w_o) // len(self.values)
        return [slice(g * G, (g + 1) * G) for g in range(len(self.values))]

    def value_norms(self, p: int) -> Tensor:
        """m_i = ‖V_i W_O‖_p by query head, ``[H, k]``; one head at a time, so that nothing is repeated G times."""
        pairs = zip(self.values, self.groups(), strict=True)
        return torch.stack([value_norms(V, W_O, p) for V, group in pairs for W_O in self.w_o[group]])

    def projected_norms(self, x: Tensor, p: int) -> Tensor:
        """‖x_h W_O^h‖_p of rows ``[H, ..., d]``, head by head, in the dtype of ``x``."""
        return torch.stack([projected_norms(rows, W_O, p) for rows, W_O in zip(x, self.w_o, strict=True)])

    @property
    def total(self) -> Tensor:
        """All of each row's mass, ``[H, Q]``: 1, or 0 where a query sees no key and there is no learned sink."""
        mass = self.A.sum(-1)
        return mass if self.sink_mass is None else mass + self.sink_mass


def prepare(view: LayerLike, margin: int = 0) -> Heads:
    """Attention rows and values of a layer over the visible keys and ``margin`` keys on either side."""
    seen = view.logits.isneginf().logical_not_()
    keys = seen.any(0).any(0).nonzero()[:, 0]
    lo, hi = (int(keys[0]), int(keys[-1]) + 1) if len(keys) else (0, 1)
    lo, hi = max(0, lo - margin), min(view.logits.shape[-1], hi + margin)
    sink = None if view.sink is None else view.sink.double()[:, None]
    A, sink_mass = attention(view.logits[..., lo:hi].double(), sink)
    dtype = torch.promote_types(torch.promote_types(view.values.dtype, view.w_o.dtype), torch.float32)
    return Heads(lo, A, sink_mass, seen[..., lo:hi], view.values[:, lo:hi].to(dtype), view.w_o.to(dtype))


def check_spans(spans: Any, n: int) -> list[Span]:
    """Spans as pairs of ints, or an error quoting the first that is not within the ``n`` keys.

    Raises
    ------
    PromptError
        No spans, or a span that is empty, outside [0, n), or not a pair of integers.
    """
    if not isinstance(spans, Iterable) or isinstance(spans, str):
        raise PromptError(f"spans are {quote(spans)}; allowed: a list of (start, stop)")
    checked = [_check_span(span, n) for span in spans]
    if not checked:
        raise PromptError(f"no spans given; allowed: at least one (start, stop) with 0 <= start < stop <= {n}")
    return checked


def _check_span(span: Sequence[int], n: int) -> Span:
    try:
        start, stop = map(operator.index, span)
    except (TypeError, ValueError):
        raise PromptError(f"span {span!r}; allowed: two integers (start, stop), half-open") from None
    if not 0 <= start < stop <= n:
        raise PromptError(f"span ({start}, {stop}) with n = {n} keys; allowed: 0 <= start < stop <= {n}")
    return start, stop

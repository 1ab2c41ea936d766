"""One layer after the other, in chunks of query rows: what a pass over a trace costs in memory is one chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprobe import inputs
from kvprobe.errors import TheoryError, quote
from kvprobe.spans.inputs import Heads, LayerLike, prepare
from kvprobe.theory import value_norms

Array = NDArray[np.float64]

CHUNK_BYTES = 4 << 20
"""Float64 attention held at once, so that no heads × n × n exists; this small, a chunk stays in a core's cache."""
MIN_ROWS = 16


class Observed(Protocol):
    """What this package reads of a trace."""

    @property
    def n(self) -> int:
        """Key columns."""

    @property
    def n_layers(self) -> int:
        """Layers."""

    @property
    def n_heads(self) -> int:
        """Query heads."""

    @property
    def queries(self) -> Sequence[int]:
        """Absolute positions of the observed rows."""

    @property
    def pad(self) -> int:
        """Left pads."""

    def layer(self, index: int, rows: Any = None) -> LayerLike:
        """One layer, all rows or some."""


def row_indices(trace: Observed, rows: Any) -> list[int]:
    """Indices of the chosen rows among the trace's."""
    if rows is None:
        return list(range(len(trace.queries)))
    place = {query: index for index, query in enumerate(trace.queries)}
    chosen = inputs.positions(rows, trace.n, trace.pad)
    if missing := [query for query in chosen if query not in place]:
        raise TheoryError(
            f"rows name position {missing[0]}, which the trace did not observe; allowed: {quote(list(trace.queries))}"
        )
    return [place[query] for query in chosen]


def layer_chunks(trace: Observed, index: int, at: Sequence[int]) -> Iterator[Heads]:
    """Float64 attention of rows ``at`` (indices among the trace's) of one layer, a few rows at a time."""
    step = max(MIN_ROWS, CHUNK_BYTES // (8 * trace.n_heads * trace.n))
    for start in range(0, len(at), step):
        yield prepare(trace.layer(index, rows=at[start : start + step]))


def layer_norms(view: LayerLike, p: int = 1) -> Array:
    """m_j = ‖V_j W_O‖_p of every key by query head, [H, n], in float64; kv head h // (H // K) serves query head h."""
    G = len(view.w_o) // len(view.values)
    rows = [value_norms(view.values[h // G].double(), W_O, p) for h, W_O in enumerate(view.w_o)]
    return np.asarray(torch.stack(rows).cpu().numpy())


@dataclass
class Sums:
    """Running sums of one layer over chunks of query rows: Σ A [H, n], rows that see a key [n], learned mass [H]."""

    mass: Tensor
    seen: Tensor
    learned: Tensor
    rows: int = 0

    @classmethod
    def zero(cls, n_heads: int, n: int) -> Sums:
        """Nothing yet."""
        mass, learned = (torch.zeros(shape, dtype=torch.float64) for shape in ((n_heads, n), (n_heads,)))
        return cls(mass, torch.zeros(n, dtype=torch.int64), learned)

    def add(self, heads: Heads) -> None:
        """A chunk of rows, over the keys that it sees."""
        _, rows, k = heads.A.shape
        keys = slice(heads.first, heads.first + k)
        self.mass[:, keys] += heads.A.sum(1).cpu()
        self.seen[keys] += heads.visible[0].sum(0).cpu()
        if heads.sink_mass is not None:
            self.learned += heads.sink_mass.sum(1).cpu()
        self.rows += rows

    def means(self) -> tuple[Array, NDArray[np.int64], Array]:
        """s [H, n] (NaN where nothing sees the key), seen [n], and the learned sink's mean mass [H]."""
        mass = torch.where(self.seen > 0, self.mass / self.seen, torch.nan)
        return mass.numpy(), self.seen.numpy(), (self.learned / self.rows).numpy()

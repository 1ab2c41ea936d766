"""Mass, value mass and their ratio of every key, head and layer: what attention takes, and what it carries.

For one head and chosen query rows q, with A the attention row and m_j = ‖V_j W_O‖_p:

=======  ======================================  ====================================================================
s        s_j = mean_q A_qj                       mass, over the queries that see j (Gu et al., arXiv 2410.10781)
s^val    mean_q (A_qj + ε) m_j = (s_j + ε) m_j   value mass; (A + ε) m is CriticalKV's score (arXiv 2502.03805)
ρ        Σ_q A_qj m_j / Σ_q A_qj                 value per mass, without ε; NaN where Σ A = 0. Derived for kvprobe
=======  ======================================  ====================================================================

Within one head ρ is m itself: queries and keys enter it only when heads (or layers) are pooled, each with the mass that
it spends. With ε inside, ρ would be m (1 + ε/s): where s ≪ ε that ranks keys by 1/s, not by what they carry
(:func:`kvprobe.sinks.epsilon_sweep` shows it). A classic sink has high s and low ρ; evidence that is read has both.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvprobe.errors import TheoryError, quote
from kvprobe.sinks import checks
from kvprobe.sinks.buckets import Buckets
from kvprobe.sinks.streaming import Array, Observed, Sums, layer_chunks, layer_norms, row_indices
from kvprobe.theory.checks import check_p

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["EPSILON", "POOLS", "QUANTITIES", "Array", "Scores", "check_epsilon", "check_pool", "layer_norms", "scores"]

POOLS = ("head", "layer", "all")
QUANTITIES = ("mass", "value_mass", "norm")
EPSILON = 1e-4
LARGEST = 1e6
"""ε above any mass by far; beyond it value masses say nothing, and in the end they overflow."""


@dataclass(frozen=True)
class Scores:
    """Mass and value norms of every key, reduced over chosen query rows.

    Attributes
    ----------
    mass
        [L, H, n] float64, s_j: mean of A_qj over the chosen queries that see key j; NaN where none does. Where every
        chosen query sees the same keys, s and ``learned`` sum to 1 over keys; in general the means have different rows.
    norms
        [L, H, n] float64, m_j = ‖V_j W_O‖_p of every key, seen or not.
    seen
        [L, n] how many of the chosen queries see key j (fewer in a layer with a window); 0 for left pads.
    learned
        [L, H] mean mass of the learned sink; 0 without one.
    queries
        Absolute positions of the chosen rows.
    pad, p, epsilon
        Left pads; the norm; ε of :meth:`value_mass` unless another is given.
    """

    mass: Array = field(repr=False)
    norms: Array = field(repr=False)
    seen: NDArray[np.int64] = field(repr=False)
    learned: Array = field(repr=False)
    queries: tuple[int, ...] = field(repr=False)
    pad: int = 0
    p: int = 1
    epsilon: float = EPSILON

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, H, n)."""
        layers, heads, n = self.mass.shape
        return layers, heads, n

    def value_mass(self, epsilon: float | None = None) -> Array:
        """s^val_j = mean_q (A_qj + ε) m_j = (s_j + ε) m_j, [L, H, n]; NaN where no chosen query sees j."""
        return (self.mass + check_epsilon(self.epsilon if epsilon is None else epsilon)) * self.norms

    def relative_norms(self) -> Array:
        """m_j over the median m of its head, [L, H, n]; the median is over the keys that some chosen query sees.

        Value norms grow with depth: in these units a pooled ρ is not decided by the last layers alone. NaN where the
        median is 0 and in a layer of which nothing is seen.
        """
        visible = np.where(self.seen[:, None] > 0, self.norms, np.nan)
        found = np.array([[_median(head) for head in layer] for layer in visible])
        return self.norms / np.where(found > 0, found, np.nan)[..., None]

    def ratio(self, pool: str = "head", relative: bool = False, layers: Sequence[int] | None = None) -> Array:
        """ρ_j = Σ A_qj m_j / Σ A_qj, without ε; NaN where Σ A = 0.

        Parameters
        ----------
        pool
            Both sums are over query rows, and over ``"head"``: nothing else, [L, H, n], which is m_j; ``"layer"``: the
            heads of a layer, [L, n]; ``"all"``: heads and layers, [n].
        relative
            With m in units of its head's median (:meth:`relative_norms`).
        layers
            Layers that ``"all"`` pools; all by default.
        """
        m = self.relative_norms() if relative else self.norms
        total = (
            np.nan_to_num(self.mass) * self.seen[:, None]
        )  # Σ_q A, so that a window's rows count as many as they are
        if check_pool(pool) == "head":
            return np.where(total > 0, m, np.nan)
        axes = (1,) if pool == "layer" else (0, 1)
        chosen = self._layers(pool, layers)
        below = total[chosen].sum(axes)
        above = np.where(total[chosen] > 0, total[chosen] * m[chosen], 0.0).sum(axes)
        return np.divide(above, below, out=np.full(below.shape, np.nan), where=below > 0)

    def pooled(
        self,
        quantity: str = "mass",
        pool: str = "all",
        *,
        epsilon: float | None = None,
        relative: bool = False,
        layers: Sequence[int] | None = None,
    ) -> Array:
        """Mean over heads (``"layer"``, [L, n]), over heads and layers (``"all"``, [n]), or none (``"head"``).

        Parameters
        ----------
        quantity
            ``"mass"`` s, ``"value_mass"`` (s + ε) m, or ``"norm"`` m.
        epsilon, relative, layers
            As in :meth:`value_mass` and :meth:`ratio`; a mass has no units to be relative in.

        Returns
        -------
        ndarray
            NaN where no chosen query sees the key; ``"all"`` takes the mean over the layers in which one does.
        """
        if quantity not in QUANTITIES:
            raise TheoryError(f"quantity={quote(quantity)}; allowed: {', '.join(QUANTITIES)}")
        m = self.relative_norms() if relative else self.norms
        added = check_epsilon(self.epsilon if epsilon is None else epsilon)
        table = {"mass": self.mass, "value_mass": (self.mass + added) * m, "norm": m}[quantity]
        table = np.where(self.seen[:, None] > 0, table, np.nan)
        if check_pool(pool) == "head":
            return table
        by_layer = table.mean(1)
        return by_layer if pool == "layer" else _nanmean(by_layer[self._layers(pool, layers)])

    def bucket_table(self, buckets: Buckets, epsilon: float | None = None) -> pd.DataFrame:
        """One row a layer × head × bucket that holds a key.

        Returns
        -------
        DataFrame
            ``layer, head, bucket, n_tokens, n_seen`` (those that some chosen query sees: all sums are over them),
            ``mass`` Σ s, ``value_mass`` Σ (s + ε) m, ``value`` Σ s m, ``ratio`` Σ s m / Σ s (NaN for 0 / 0), and
            ``mass_per_token``, ``value_mass_per_token`` (over ``n_seen``). A learned sink is one more key with value 0
            and ratio 0, in the layers that have one.
        """
        from kvprobe.sinks.bucketing import bucket_table

        checks.instance(buckets, Buckets, "buckets", "what sinks.buckets returns")
        return bucket_table(self, buckets, check_epsilon(self.epsilon if epsilon is None else epsilon))

    def _layers(self, pool: str, layers: Sequence[int] | None) -> list[int]:
        return self.chosen(None if pool != "all" else layers)

    def chosen(self, layers: Sequence[int] | None) -> list[int]:
        """The layers that are pooled: all for None; refused when there is none, an unknown one, or one twice."""
        everything = list(range(len(self.mass)))
        if layers is None:
            return everything
        try:
            chosen = [operator.index(layer) for layer in layers]
        except TypeError:
            chosen = []
        if not chosen or not set(chosen) <= set(everything) or len(set(chosen)) < len(chosen):
            raise TheoryError(f"layers={quote(layers)}; allowed: one or more of 0 … {everything[-1]}, each once")
        return chosen


def scores(trace: Observed, epsilon: float = EPSILON, p: int = 1, rows: Any = None) -> Scores:
    """Mass and value norms of every key from a trace, layer by layer and in chunks of query rows.

    Parameters
    ----------
    trace
        A :class:`kvprobe.Trace`. Its rows are the queries that means are taken over.
    epsilon
        ε ≥ 0 of the value mass.
    p
        Norm of m_j, 1 or 2.
    rows
        Absolute positions of the rows to use (a position, a list, or a slice; negative ones count from the end), all of
        them among the trace's; None for all rows.

    Returns
    -------
    Scores
        Softmaxes and sums in float64, of the trace's float32 logits.

    Raises
    ------
    TheoryError
        No trace, ε < 0 or above 1e6, p neither 1 nor 2, or rows that the trace does not have.

    Notes
    -----
    Equal to the slow line ``A = softmax(logits); s = A.sum(1) / visible.sum(0); m = ‖V W_O‖_p`` of every layer.
    """
    checks.observed(trace)
    check_epsilon(epsilon)
    check_p(p)
    at = row_indices(trace, rows)
    parts = [_layer(trace, index, at, p) for index in range(trace.n_layers)]
    mass, norms, seen, learned = (np.stack(part) for part in zip(*parts, strict=True))
    return Scores(mass, norms, seen, learned, tuple(trace.queries[i] for i in at), trace.pad, p, float(epsilon))


def _layer(trace: Observed, index: int, at: Sequence[int], p: int) -> tuple[Array, Array, NDArray[np.int64], Array]:
    sums = Sums.zero(trace.n_heads, trace.n)
    for heads in layer_chunks(trace, index, at):
        sums.add(heads)
    mass, seen, learned = sums.means()
    return mass, layer_norms(trace.layer(index, rows=at[:1]), p), seen, learned


def check_epsilon(epsilon: float) -> float:
    """ε as a float, refused when it is negative, above :data:`LARGEST` or no number."""
    number = isinstance(epsilon, (int, float, np.integer, np.floating)) and not isinstance(epsilon, bool)
    if not number or not 0 <= epsilon <= LARGEST:
        raise TheoryError(f"epsilon={quote(epsilon)}; allowed: a number from 0 to {LARGEST:g}")
    return float(epsilon)


def check_pool(pool: str) -> str:
    """A pool by name."""
    if pool not in POOLS:
        raise TheoryError(f"pool={quote(pool)}; allowed: {', '.join(POOLS)}")
    return pool


def _median(values: Array) -> float:
    """Median without NaN, NaN (and no warning) where nothing is left."""
    left = values[~np.isnan(values)]
    return float(np.median(left)) if left.size else float("nan")


def _nanmean(table: Array) -> Array:
    """Mean over axis 0 without NaN; NaN (and no warning) where nothing is left."""
    there = ~np.isnan(table)
    count = there.sum(0)
    return np.divide(np.where(there, table, 0.0).sum(0), count, out=np.full(count.shape, np.nan), where=count > 0)

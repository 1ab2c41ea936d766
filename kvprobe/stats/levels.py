"""The level that a permutation test can hold exactly, and the band around it in which a simulated rate must lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from kvprobe.errors import StatisticsError
from kvprobe.stats.checks import check, is_whole

MOST = 2**20
"""Assignments up to which Monte Carlo's level is an exact sum over the true p; beyond, the sum is its integral."""


def attainable_level(
    n_items: int,
    n_spans: int | Sequence[int],
    alpha: float = 0.05,
    draws: int | None = None,
    *,
    strict: bool = False,
) -> float:
    """P(p <= alpha) of `permutation_within_item` under its null, one target an item, mean difference, untied scores.

    The N = prod_i m_i assignments of the target (m_i spans in item i) are equally likely, and their |T| all differ, so
    p is uniform on {1/N, ..., 1}: the level is floor(alpha N)/N. Where all items have two spans, T and -T come in pairs
    and N counts pairs. Monte Carlo (`draws`): a true p of q gives (b + 1)/(draws + 1), b ~ Binomial(draws, q), not
    below 1/N; the level is the mean of P(p <= alpha) over q = j/N. With tied scores the exact test rejects at most as
    often as this.

    Parameters
    ----------
    n_items, n_spans
        Items, and each item's spans with the target (one number, or one an item). An item of one span tests nothing.
    alpha
        Where the test rejects, 0 < alpha < 1.
    draws
        Monte Carlo draws; None: p is exact (as it is while N <= the test's ``exact_limit``).
    strict
        Reject for p < alpha instead of p <= alpha.
    """
    check(alpha, n_items=n_items)
    sizes = list(n_spans) if isinstance(n_spans, (Sequence, np.ndarray)) else [n_spans] * n_items
    if len(sizes) != n_items or not all(is_whole(m) and m >= 1 for m in sizes):
        raise StatisticsError(f"n_spans={n_spans!r}: allowed are an integer >= 1, or one for each of {n_items} items")
    live = [int(m) for m in sizes if m > 1]
    if not live:
        return 0.0  # every p is 1
    count = math.prod(live) // (2 if set(live) == {2} else 1)
    if draws is None:
        return float(Fraction(_upto(alpha, count, strict), count))
    check(draws=draws)
    return _monte_carlo(count, _upto(alpha, draws + 1, strict) - 1, draws) if _upto(alpha, count, strict) else 0.0


def _upto(alpha: float, count: int, strict: bool) -> int:
    """How many of 1/count, 2/count, … are <= (or <) alpha, in whole numbers: 0.05 is 1/20, not the double beside it."""
    bar = Fraction(repr(float(alpha))) * count
    return math.ceil(bar) - 1 if strict else math.floor(bar)


def _monte_carlo(count: int, most: int, draws: int) -> float:
    """Mean over q = j/count of P(Binomial(draws, q) <= most)."""
    if most < 0:
        return 0.0
    if count > MOST:  # Euler and Maclaurin: the integral is (most + 1)/(draws + 1), and the sum leaves out q = 0
        return (most + 1) / (draws + 1) - 0.5 / count
    from scipy.stats import binom

    return float(binom.cdf(most, draws, np.arange(1, count + 1) / count).mean())


def rejection_band(level: float, draws: int, confidence: float = 0.99) -> tuple[float, float]:
    """The rates, ends included, in which a test of exactly this level falls over `draws` draws with `confidence`.

    Exact: Binomial(draws, level) lies below `low` with probability < (1 - confidence)/2, and above `high` with no more.

    Parameters
    ----------
    level
        Probability of a rejection, in [0, 1] (:func:`attainable_level`).
    draws
        Independent draws of the whole data set (not a test's Monte Carlo draws).
    """
    check(confidence, draws=draws)
    if not 0 <= level <= 1:
        raise StatisticsError(f"level={level!r}: allowed are 0 <= level <= 1")
    from scipy.stats import binom

    tail = (1 - confidence) / 2
    low, high = (float(binom.ppf(q, draws, level)) / draws for q in (tail, 1 - tail))
    return max(low, 0.0), high

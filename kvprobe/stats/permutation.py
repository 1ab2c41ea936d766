"""The primary test: the target permuted within its item."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvprobe.stats import checks
from kvprobe.stats.assignments import drawn, subsets, totals
from kvprobe.stats.corrections import cannot_reject
from kvprobe.stats.design import Design, Statistic, design_of
from kvprobe.stats.exact import extreme_share, joint, tails
from kvprobe.stats.records import TestResult


def permutation_within_item(
    scores: Sequence[ArrayLike],
    is_target: Sequence[ArrayLike],
    statistic: Statistic = "mean_difference",
    seed: int = 0,
    draws: int = 9999,
    exact_limit: int = 100_000,
) -> TestResult:
    """Primary test: is the target exchangeable with the other spans of its item?

    T = mean over items of the within-item statistic, centred (AUROC - 1/2, or mean(target) - mean(rest)); under the
    null every item's target set is uniform over its subsets of that size. Two-sided, p = P(|T| >= |t|): exact where the
    joint distribution can be built with at most `exact_limit` sums a step (for AUROC nearly always, T being a lattice),
    else Monte Carlo, p = (b + 1)/(draws + 1) (Phipson & Smyth 2010). Sums equal up to rounding are ties.

    `p_attainable` is the smallest p that these scores allow: the share of assignments whose |T| is the largest
    (1/prod C(n_i, m_i) for generic scores, twice that if both extremes tie, as for AUROC with one target, more with
    ties); for Monte Carlo not below 1/(draws + 1).

    Parameters
    ----------
    scores, is_target
        One [spans] array of numbers and one of booleans an item. Items without both classes are excluded and counted.
        NaN is refused (StatisticsError); infinities are allowed for "auroc", which only ranks.
    """
    checks.check(seed=seed, draws=draws, exact_limit=exact_limit)
    design = design_of(scores, is_target, statistic, ndim=1)
    n, out = len(design.x), design.n_excluded
    if not n:
        return TestResult(math.nan, 1.0, 1.0, 0, True, "no item holds both classes", True, out)
    enumerated = _exact(design, exact_limit)
    exact, (p, attainable) = enumerated is not None, enumerated or _monte_carlo(design, seed, draws)
    method = f"permutation of the target within item, {statistic}, two-sided, {'exact' if exact else 'Monte Carlo'}"
    value = design.centre + float(design.observed()[0]) * design.unit
    hopeless, flat, used = cannot_reject(attainable), attainable >= 1, (None, None) if exact else (seed, draws)
    return TestResult(value, p, attainable, n, exact, method, hopeless, out, 0, flat, *used)


def _exact(design: Design, limit: int) -> tuple[float, float] | None:
    """p and its smallest attainable value, or None where the joint distribution takes more than `limit` sums a step."""
    if max(design.subsets) > limit:
        return None
    sums = [x[:, 0][subsets(len(x), m)].sum(axis=1) for x, m in zip(design.x, design.sizes, strict=True)]
    law = joint(sums, limit)
    return None if law is None else tails(law, float(design.observed()[0]), float(design.slack[0]))


def _monte_carlo(design: Design, seed: int, draws: int) -> tuple[float, float]:
    chosen, rows, slack = drawn(design, seed, draws), max(1, checks.TABLE // max(design.sizes)), float(design.slack[0])
    sums = [totals(design, chosen, slice(start, start + rows)) for start in range(0, draws, rows)]
    reached = np.sum(np.abs(np.concatenate(sums)) >= abs(float(design.observed()[0])) - slack)
    attainable = max(1 / (draws + 1), extreme_share([x[:, 0] for x in design.x], design.sizes, slack))
    # the true p cannot be below the share at the extreme, so chance must not put the estimate there either
    return max(float((reached + 1) / (draws + 1)), attainable), attainable

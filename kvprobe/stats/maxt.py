"""The family-wise twin of the primary test: one joint permutation for all heads, adjusted by the largest |z|."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvprobe.errors import StatisticsError
from kvprobe.stats import checks
from kvprobe.stats.assignments import Chosen, drawn, enumerated, totals
from kvprobe.stats.checks import NOISE, Floats
from kvprobe.stats.corrections import cannot_reject
from kvprobe.stats.design import Design, Statistic, design_of, total
from kvprobe.stats.exact import extreme_share
from kvprobe.stats.records import MaxTResult


def max_t_within_item(
    scores: Sequence[ArrayLike],
    is_target: Sequence[ArrayLike],
    statistic: Statistic = "auroc",
    seed: int = 0,
    draws: int = 9999,
    exact_limit: int = 20_000,
) -> MaxTResult:
    """Family of heads: single-step max-|T| adjusted p under one joint permutation of the target within item.

    z_h = T_h / sd_h, T as in `permutation_within_item`, sd_h its exact permutation standard deviation
    (sampling without replacement: Var sum_S x = m (n - m) / (n (n - 1)) sum_t x_t^2 an item, x centred).
    p_h = P(max_g |z_g| >= |z_h|): family-wise error control that keeps the dependence between heads
    (Westfall & Young 1993). All joint assignments where there are at most `exact_limit`, else (b + 1)/(draws + 1).
    `p_attainable`: share of assignments with the largest max |z|; for Monte Carlo a lower limit of it, at least
    1/(draws + 1).

    Parameters
    ----------
    scores, is_target
        One [spans, heads] array and one [spans] array of booleans an item.
    """
    checks.check(seed=seed, draws=draws, exact_limit=exact_limit)
    if not len(scores):
        raise StatisticsError("scores holds no item: at least one is needed")
    design = design_of(scores, is_target, statistic, ndim=2)
    heads, out = len(design.slack), design.n_excluded
    if not heads:
        raise StatisticsError("scores hold no head: allowed are [spans, heads] arrays with heads >= 1")
    if not design.x:
        nan, ones, why = np.full(heads, np.nan), np.ones(heads), "no item holds both classes"
        return MaxTResult(nan, nan, ones, ones, ones.astype(np.bool_), 1.0, 0, True, why, True, out)
    count = math.prod(design.subsets)
    exact = count <= exact_limit
    word = f"max-|T| over {heads} heads, permutation of the target within item, {statistic}"
    sd, observed = _permutation_sd(design), design.observed()
    flat = sd <= design.slack
    scale = np.where(flat, np.inf, sd)  # heads without variation never reach the maximum
    chosen = enumerated(design, count) if exact else drawn(design, seed, draws)
    family, own, attainable = _p_values(design, chosen, scale, exact)
    return MaxTResult(
        design.centre + observed * design.unit, observed / scale, np.where(flat, 1.0, family), np.where(flat, 1.0, own),
        flat, attainable, len(design.x), exact, f"{word}, {'exact' if exact else 'Monte Carlo'}",
        cannot_reject(attainable), out, None if exact else seed, None if exact else draws,
    )  # fmt: skip


def _permutation_sd(design: Design) -> Floats:
    parts = zip(design.x, design.sizes, strict=True)
    variance = total((x**2).sum(axis=0) * (m * (len(x) - m) / (len(x) * (len(x) - 1))) for x, m in parts)
    return np.asarray(np.sqrt(variance))


def _p_values(design: Design, chosen: Chosen, scale: Floats, exact: bool) -> tuple[Floats, Floats, float]:
    """Adjusted and own p of each head, and the smallest p that the family could have attained."""
    bar = np.abs(design.observed()) / scale - design.slack / scale - NOISE
    peak, own = _peaks(design, chosen, scale, bar)
    reached = len(peak) - np.searchsorted(np.sort(peak), bar, "left")
    if exact:
        attainable, extra = float(np.mean(peak >= peak.max() - 1e-9)), 0
    else:
        attainable, extra = _family_attainable(design, scale, len(peak)), 1
    family, alone = ((b + extra) / (len(peak) + extra) for b in (reached, own))
    return np.maximum(family, attainable), alone, attainable


def _peaks(design: Design, chosen: Chosen, scale: Floats, bar: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """max over heads of |z| for each assignment, and how often each head's own |z| reaches its bar; in chunks."""
    peak, own = np.empty(len(chosen[0])), np.zeros(len(scale), dtype=np.int64)
    rows = max(1, checks.TABLE // (len(scale) * max(design.sizes)))
    for start in range(0, len(peak), rows):
        z = np.abs(totals(design, chosen, slice(start, start + rows))) / scale
        peak[start : start + rows] = z.max(axis=1)
        own += (z >= bar).sum(axis=0)
    return peak, own


def _family_attainable(design: Design, scale: Floats, draws: int) -> float:
    """The head that can reach the largest |z| bounds the share of assignments at the family's maximum from below."""
    ordered = [np.sort(x, axis=0) for x in design.x]
    high = total(x[-m:].sum(axis=0) for x, m in zip(ordered, design.sizes, strict=True))
    low = total(x[:m].sum(axis=0) for x, m in zip(ordered, design.sizes, strict=True))
    best = int(np.argmax(np.maximum(high, -low) / scale))
    share = extreme_share([x[:, best] for x in design.x], design.sizes, float(design.slack[best]))
    return max(1 / (draws + 1), share)

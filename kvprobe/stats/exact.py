"""Distributions without drawing: the exact law of a sum over items, its tails, and the share at its extreme."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvprobe.stats.checks import Floats

Joint = tuple[Floats, Floats]  # support and weight


def joint(sums: Sequence[Floats], limit: int) -> Joint | None:
    """Exact (support, weight) of sum_i s_i, each s_i uniform over its array; None past `limit` sums in a step.

    Items are independent, so the joint distribution is the convolution of theirs; equal sums are merged as it grows,
    which is what makes large integer (AUROC) designs exact. Weights are whole counts while these fit a double.
    """
    count = math.prod(s.size for s in sums) <= 2**53
    support, weight = np.zeros(1), np.ones(1)
    for s in sums:
        atoms, times = np.unique(s, return_counts=True)
        if support.size * atoms.size > limit:
            return None
        grown = weight[:, None] * (times if count else times / s.size)
        support, place = np.unique((support[:, None] + atoms).ravel(), return_inverse=True)
        weight = np.bincount(place, weights=grown.ravel()).astype(np.float64)
    return support, weight


def tails(law: Joint, observed: float, slack: float) -> tuple[float, float]:
    """P(|T| >= |observed|) and P(|T| = max |T|), the smallest attainable p."""
    size, weight = np.abs(law[0]), law[1]
    p, attainable = (weight[size >= bar - slack].sum() / weight.sum() for bar in (abs(observed), size.max()))
    return float(p), float(attainable)


def extreme_share(x: Sequence[Floats], sizes: Sequence[int], slack: float) -> float:
    """Share of assignments with the largest |T|, without enumeration: the maximum of a sum is the sum of the maxima."""
    (high, share_high), (low, share_low) = _top(x, sizes, slack), _top([-values for values in x], sizes, slack)
    if max(high, low) <= slack:
        return 1.0  # every assignment gives T = 0
    if abs(high - low) <= slack:
        return share_high + share_low
    return share_high if high > low else share_low


def _top(x: Sequence[Floats], sizes: Sequence[int], slack: float) -> tuple[float, float]:
    """The largest T, and the share of assignments that reach it: ties at an item's cut may be broken either way."""
    top, share = 0.0, 1.0
    for values, m in zip(x, sizes, strict=True):
        ordered = np.sort(values)
        above = int((ordered > ordered[-m] + slack).sum())
        tied = int((np.abs(ordered - ordered[-m]) <= slack).sum())
        top, share = top + float(ordered[-m:].sum()), share * math.comb(tied, m - above) / math.comb(len(ordered), m)
    return top, share

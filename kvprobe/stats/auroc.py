"""AUROC from exact counts: of two samples, of many columns at once, and of each item of a design."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvprobe.errors import StatisticsError
from kvprobe.stats.checks import Floats, numbers
from kvprobe.stats.records import ItemAuroc


def auroc(positive: ArrayLike, negative: ArrayLike) -> float:
    """Mann-Whitney AUROC, P(s+ > s-) + P(s+ = s-)/2, from exact integer counts; NaN when a class is empty.

    Parameters
    ----------
    positive, negative
        Scores [P], [N]; infinities only order, NaN is refused (StatisticsError).
    """
    pos, neg = numbers(positive, "positive", finite=False), numbers(negative, "negative", finite=False)
    if not pos.size or not neg.size:
        return math.nan
    ordered = np.sort(neg)
    twice = np.searchsorted(ordered, pos, "left") + np.searchsorted(ordered, pos, "right")  # 2 below + 1 equal
    return float(twice.sum() / (2 * pos.size * neg.size))


def auroc_many(positive: ArrayLike, negative: ArrayLike) -> Floats:
    """`auroc` of many columns at once: [P, ...] and [N, ...] -> [...], equal to it bit for bit; empty class -> NaN.

    Steps over the smaller class, never over columns; memory is one [max(P, N), ...] comparison.
    """
    pos = numbers(positive, "positive", ndim=None, finite=False)
    neg = numbers(negative, "negative", ndim=None, finite=False)
    if not pos.ndim or not neg.ndim or pos.shape[1:] != neg.shape[1:]:
        raise StatisticsError(f"positive {pos.shape} and negative {neg.shape} must be [P, ...] and [N, ...], same ...")
    if not len(pos) or not len(neg):
        return np.full(pos.shape[1:], np.nan)
    twice = np.zeros(pos.shape[1:], dtype=np.int64)
    if len(pos) <= len(neg):
        for row in pos:
            twice += (neg < row).sum(0) + (neg <= row).sum(0)
    else:
        for row in neg:
            twice += (pos > row).sum(0) + (pos >= row).sum(0)
    return np.asarray(twice / (2 * len(pos) * len(neg)), dtype=np.float64)


def item_auroc(items: Sequence[tuple[ArrayLike, ArrayLike]]) -> ItemAuroc:
    """Within-item AUROC of (positive, negative) pairs; items with an empty class are excluded and counted.

    The values are what `auroc_interval` resamples: the unit is the item, never the pair or the span
    (single class: scikit-learn#30079).
    """
    values = np.array([auroc(positive, negative) for positive, negative in items], dtype=np.float64)
    kept = np.flatnonzero(~np.isnan(values))
    return ItemAuroc(values[kept], kept, len(kept), len(values) - len(kept))

"""The design of the permutation tests: either statistic written as a sum over the target's spans."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from kvprobe.errors import StatisticsError
from kvprobe.stats.checks import NOISE, Bools, Floats, numbers

Statistic = Literal["mean_difference", "auroc"]


@dataclass(frozen=True)
class Design:
    """Informative items. Target sets S_i have the centred mean statistic unit * sum_i sum_{t in S_i} x_it."""

    x: list[Floats]  # [spans, heads] an item
    mask: list[Bools]  # [spans] an item
    centre: float  # the statistic under the null
    unit: float
    slack: Floats  # [heads]: rounding noise of a sum over items
    n_excluded: int

    @property
    def sizes(self) -> list[int]:
        """Spans of each item's target."""
        return [int(mask.sum()) for mask in self.mask]

    @property
    def subsets(self) -> list[int]:
        """Target sets that each item could have had."""
        return [math.comb(len(x), m) for x, m in zip(self.x, self.sizes, strict=True)]

    def observed(self) -> Floats:
        """The observed sum, [heads]."""
        return total([x[mask].sum(axis=0) for x, mask in zip(self.x, self.mask, strict=True)])


def total(parts: Iterable[Floats]) -> Floats:
    """Sum of arrays one by one (np.sum would stack all items first)."""
    return functools.reduce(np.add, parts)


def design_of(scores: Sequence[ArrayLike], is_target: Sequence[ArrayLike], statistic: str, ndim: int) -> Design:
    """Check the items, drop single-class ones, and write either statistic as a sum over the target's spans.

    mean difference: sum_S (w - mean w) n / (m (n - m));  AUROC - 1/2: sum_S (r - (n + 1)/2) / (m (n - m)), r midranks.
    """
    if statistic not in ("mean_difference", "auroc"):
        raise StatisticsError(f"statistic={statistic!r}: allowed are 'mean_difference', 'auroc'")
    items, heads = _items(scores, is_target, ndim, finite=statistic == "mean_difference")
    live = [(w, mask) for w, mask in items if 0 < mask.sum() < mask.size]
    x, slack, scale = (_ranked if statistic == "auroc" else _centred)(live)
    noise = total([np.zeros(heads), *slack])
    centre, unit = 0.5 if statistic == "auroc" else 0.0, 1 / max(len(live), 1) / scale
    return Design(x, [mask for _, mask in live], centre, unit, noise, len(items) - len(live))


def _items(
    scores: Sequence[ArrayLike], is_target: Sequence[ArrayLike], ndim: int, finite: bool
) -> tuple[list[tuple[Floats, Bools]], int]:
    """Every item's scores [spans, heads] and mask [spans], and the number of heads, which all items share."""
    if len(scores) != len(is_target):
        raise StatisticsError(f"scores has {len(scores)} items, is_target {len(is_target)}: they must be equal")
    items = [_item(s, m, i, ndim, finite) for i, (s, m) in enumerate(zip(scores, is_target, strict=True))]
    heads = sorted({w.shape[1] for w, _ in items})
    if len(heads) > 1:
        raise StatisticsError(f"scores must have one number of heads, got {heads}")
    return items, heads[0] if heads else 0


def _item(scores: ArrayLike, is_target: ArrayLike, i: int, ndim: int, finite: bool) -> tuple[Floats, Bools]:
    w = numbers(scores, f"scores of item {i}", ndim=ndim, finite=finite)
    mask = np.asarray(is_target)
    if mask.shape != w.shape[:1] or not np.isin(mask, (0, 1)).all():
        raise StatisticsError(f"is_target of item {i}: {mask!r:.80}; allowed are {len(w)} booleans, one a span")
    return (w[:, None] if ndim == 1 else w), mask.astype(np.bool_)


def _pairs(mask: Bools) -> int:
    return int(mask.sum()) * int((~mask).sum())


def _centred(live: list[tuple[Floats, Bools]]) -> tuple[list[Floats], list[Floats], int]:
    """Summands [spans, heads] and noise [heads] an item, and their scale, for the mean difference."""
    x = [(w - w.mean(axis=0)) * (len(w) / _pairs(mask)) for w, mask in live]
    return x, [NOISE * 2 * np.abs(w).max(axis=0) for w, _ in live], 1


def _ranked(live: list[tuple[Floats, Bools]]) -> tuple[list[Floats], list[Floats], int]:
    """The same for AUROC - 1/2.

    Midranks are doubled and brought to a common denominator, so that sums are integers and ties exact.
    """
    denominators = [2 * _pairs(mask) for _, mask in live]
    common = math.lcm(*denominators)
    if common * len(live) >= 1e9:  # past that, floats; the slack takes over
        common = 1
    factors = [common // d if common > 1 else 1 / d for d in denominators]
    x = [_doubled_midranks(w) * factor for (w, _), factor in zip(live, factors, strict=True)]
    return x, [np.full(w.shape[1], NOISE * common / 2) for w, _ in live], common


def _doubled_midranks(w: Floats) -> Floats:
    """2 midrank - (n + 1) of each column [spans, heads]: integers that sum to zero."""
    from scipy.stats import rankdata

    return np.asarray(2 * rankdata(w, axis=0) - (len(w) + 1))

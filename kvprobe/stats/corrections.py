"""What becomes of a p-value: adjusted within its family, or unable to reject whatever had been observed."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kvprobe.errors import StatisticsError
from kvprobe.stats.checks import NOISE, Floats, check, numbers


def cannot_reject(p_attainable: float, level: float = 0.05, family: int = 1) -> bool:
    """True if no data could give p <= level: print "cannot reject", never "not significant".

    With `family` hypotheses the smallest Holm- (or Bonferroni-) adjusted p is family * p_attainable.
    """
    check(level, family=family)
    return bool(p_attainable * family > level * (1 + NOISE))


def _p_values(p: ArrayLike) -> Floats:
    values = numbers(p, "p")
    if values.size and (values.min() < 0 or values.max() > 1):
        raise StatisticsError(f"p spans [{values.min():g}, {values.max():g}]: allowed is [0, 1]")
    return values


def holm(p: ArrayLike) -> Floats:
    """Holm's step-down adjusted p-values [m]: running maximum of (m - i) p_(i), capped at 1 (Holm 1979)."""
    values = _p_values(p)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(values[order] * np.arange(values.size, 0, -1)), 1)
    return adjusted


def benjamini_hochberg(p: ArrayLike) -> Floats:
    """Benjamini-Hochberg adjusted p-values [m]: running minimum from the top of m p_(i)/i (1995); FDR, not FWER."""
    values = _p_values(p)
    order = np.argsort(values, kind="stable")[::-1]
    ranks = np.arange(values.size, 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.minimum.accumulate(values[order] * values.size / ranks), 1)
    return adjusted

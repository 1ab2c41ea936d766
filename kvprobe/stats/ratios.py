"""Ratio of two averages over the same items, with its interval."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from kvprobe.errors import StatisticsError
from kvprobe.stats.bca import resample_weights
from kvprobe.stats.checks import NOISE, Floats, check, numbers
from kvprobe.stats.records import Interval


def ratio_interval(
    top: ArrayLike, bottom: ArrayLike, level: float = 0.95, seed: int = 0, resamples: int = 9999
) -> Interval:
    """Mean of ``top`` over mean of ``bottom``, both [n] over the same items, with an interval over items.

    Items are resampled in pairs. t for n < 10, from the linearised ratio (residuals (top - R bottom) / mean(bottom));
    BCa with jackknife acceleration from n >= 10 on, with t beside it, as in `mean_interval`. A ratio that is the same
    in every item has zero width (`degenerate`); n < 2 gives NaN limits.

    Parameters
    ----------
    top, bottom
        [n] finite numbers; ``bottom`` > 0 in every item (StatisticsError otherwise): resampled means are then > 0, too.

    Notes
    -----
    Cochran 1977, ch. 6 (ratio estimators); Efron & Tibshirani 1993, eq. 14.10 and 14.15 (BCa).
    """
    check(level, seed, resamples=resamples)
    x, y = numbers(top, "top"), numbers(bottom, "bottom")
    if x.size != y.size or (y.size and y.min() <= 0):
        raise StatisticsError(
            f"top has {x.size} items, bottom {y.size} with minimum {y.min(initial=math.inf):g}: allowed is one number "
            "an item in both, and bottom > 0"
        )
    if x.size < 2:
        ratio = float(x[0] / y[0]) if x.size else math.nan
        return Interval(ratio, math.nan, math.nan, x.size, "undefined: n < 2", None, True, level, seed)
    ratio = float(x.mean() / y.mean())
    residuals = (x - ratio * y) / y.mean()
    if np.abs(residuals).max() <= NOISE * max(abs(ratio), float(np.abs(x).max() / y.mean())):
        return Interval(ratio, ratio, ratio, x.size, "degenerate: identical ratios", None, True, level, seed)
    t = _t(ratio, residuals, level)
    if x.size < 10:
        return t
    low, high = _bca(x, y, ratio, level, seed, resamples)
    if math.isnan(low) or math.isnan(high):
        return t
    return Interval(ratio, low, high, x.size, "BCa", t, False, level, seed, resamples)


def _t(ratio: float, residuals: Floats, level: float) -> Interval:
    from scipy.stats import t as student

    n = residuals.size
    half = float(student.ppf(0.5 + level / 2, n - 1) * residuals.std(ddof=1) / math.sqrt(n))
    return Interval(ratio, ratio - half, ratio + half, n, "t", level=level)


def _bca(x: Floats, y: Floats, ratio: float, level: float, seed: int, resamples: int) -> tuple[float, float]:
    """Both limits; NaN where all resamples lie on one side of the ratio."""
    from scipy.special import ndtr, ndtri

    weights = resample_weights(x.size, seed, resamples)
    drawn = (weights @ x) / (weights @ y)
    slack = NOISE * max(abs(ratio), float(np.abs(drawn).max()))
    z0 = ndtri(((drawn < ratio - slack).mean() + (drawn <= ratio + slack).mean()) / 2)
    left_out = (x.sum() - x) / (y.sum() - y)
    d = left_out.mean() - left_out
    acceleration = (d**3).sum() / (6 * (d**2).sum() ** 1.5)
    if not math.isfinite(z0):
        return math.nan, math.nan
    z = ndtri([0.5 - level / 2, 0.5 + level / 2])
    low, high = np.quantile(drawn, ndtr(z0 + (z0 + z) / (1 - acceleration * (z0 + z))))
    return float(low), float(high)

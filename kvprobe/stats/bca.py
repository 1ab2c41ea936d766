"""BCa bootstrap intervals of many column means at once: the item is resampled, the pairing between columns is kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from kvprobe.stats import checks
from kvprobe.stats.checks import NOISE, Bools, Floats


def bca_many(
    values: ArrayLike, level: float = 0.95, seed: int = 0, resamples: int = 9999
) -> tuple[Floats, Floats, Bools]:
    """BCa intervals of the column means of values [n, H] -> low [H], high [H], degenerate [H].

    All columns share the resampled items (the pairing is kept). With a_ = sum d^3 / (6 (sum d^2)^1.5), d = x - mean,
    z0 = Phi^-1(P(m* < m) + P(m* = m)/2): percentiles Phi(z0 + (z0 + z)/(1 - a_(z0 + z))). Equals
    `scipy.stats.bootstrap(..., method="BCa", rng=seed)` but for resamples equal to the mean, which are ties here even
    when rounding moves them. Identical columns: low = high = mean, flagged; n < 2: NaN, flagged.
    Source: Efron & Tibshirani 1993, eq. 14.10.
    """
    checks.check(level, seed, resamples=resamples)
    x = checks.numbers(values, "values", ndim=2)
    n, width = x.shape
    if n < 2:
        return np.full(width, np.nan), np.full(width, np.nan), np.ones(width, dtype=bool)
    weights, columns = resample_weights(n, seed, resamples), max(1, checks.TABLE // resamples)
    mean, degenerate = x.mean(axis=0), checks.identical(x)
    low, high = mean.copy(), mean.copy()
    for start in range(0, width, columns):
        live = np.flatnonzero(~degenerate[start : start + columns]) + start
        low[live], high[live] = _limits(weights, x[:, live], mean[live], level)
    return low, high, degenerate | np.isnan(low) | np.isnan(high)


def resample_weights(n: int, seed: int, resamples: int) -> Floats:
    """How often each resample holds each item: [resamples, n], rows sum to n."""
    picks = np.random.default_rng(seed).integers(0, n, (resamples, n))
    flat = (picks + n * np.arange(resamples)[:, None]).ravel()
    return np.bincount(flat, minlength=resamples * n).reshape(resamples, n).astype(np.float64)


def _limits(weights: Floats, x: Floats, mean: Floats, level: float) -> tuple[Floats, Floats]:
    """Both limits of columns [n, H] that vary; NaN where all resamples lie on one side of the mean."""
    from scipy.special import ndtr, ndtri

    means, slack = np.sort(weights @ x / len(x), axis=0), NOISE * np.abs(x).max(axis=0)
    below, upto = (means < mean - slack).mean(axis=0), (means <= mean + slack).mean(axis=0)
    z0, d = ndtri((below + upto) / 2), x - mean
    acceleration = (d**3).sum(axis=0) / (6 * (d**2).sum(axis=0) ** 1.5)

    def limit(z: float) -> Floats:
        with np.errstate(invalid="ignore"):  # an infinite z0 gives NaN, which the caller flags
            return _quantile(means, ndtr(z0 + (z0 + z) / (1 - acceleration * (z0 + z))))

    return limit(ndtri(0.5 - level / 2)), limit(ndtri(0.5 + level / 2))


def _quantile(ordered: Floats, share: Floats) -> Floats:
    """Linear quantile of each sorted column at its own share; NaN where the share is not finite."""
    place = np.where(np.isfinite(share), share, 0) * (len(ordered) - 1)
    floor = np.minimum(place.astype(int), max(len(ordered) - 2, 0))
    column = np.arange(ordered.shape[1])
    left, right = ordered[floor, column], ordered[np.minimum(floor + 1, len(ordered) - 1), column]
    return np.asarray(np.where(np.isfinite(share), left + (place - floor) * (right - left), np.nan))

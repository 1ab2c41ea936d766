"""Confidence intervals of one mean over items: of any numbers, of AUROCs and shares, of a share of items."""

from __future__ import annotations

import math
from dataclasses import replace

from numpy.typing import ArrayLike

from kvprobe.errors import StatisticsError
from kvprobe.stats.bca import bca_many
from kvprobe.stats.checks import Floats, check, identical, is_whole, numbers
from kvprobe.stats.records import Interval


def mean_interval(
    values: ArrayLike,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = 9999,
    bounds: tuple[float, float] | None = None,
) -> Interval:
    """Confidence interval of a mean over items: t for n < 10 with BCa beside it, from n >= 10 BCa with t beside it.

    t: mean +- t_{n-1} s/sqrt(n). BCa (Efron 1987): bootstrap percentiles of the mean, corrected for bias and
    acceleration; it covers only 83-88 % at n = 6, hence the t-interval there. n < 2 gives NaN bounds, identical values
    a zero width (scipy#14351: BCa NaN): both with `degenerate=True`. For shares and AUROCs use `auroc_interval`.

    Parameters
    ----------
    values
        [n], one finite number an item (StatisticsError otherwise: exclude and count first).
    bounds
        Range of the values, to which the t-interval is clipped; values outside it are refused.
    """
    check(level, seed, resamples=resamples)
    x = numbers(values, "values")
    if bounds is not None and x.size and (x.min() < bounds[0] or x.max() > bounds[1]):
        raise StatisticsError(f"values span [{x.min():g}, {x.max():g}]: allowed by bounds is {tuple(bounds)}")
    if x.size < 2:
        mean = float(x[0]) if x.size else math.nan
        return Interval(mean, math.nan, math.nan, x.size, "undefined: n < 2", None, True, level, seed)
    if identical(x[:, None])[0]:
        mean = float(x.mean())
        return Interval(mean, mean, mean, x.size, "degenerate: identical values", None, True, level, seed)
    t, bca = _t_interval(x, level, bounds), _bca_interval(x, level, seed, resamples)
    main, other = (t, bca) if x.size < 10 or bca.degenerate else (bca, t)
    return replace(main, beside=other)


def _t_interval(x: Floats, level: float, bounds: tuple[float, float] | None) -> Interval:
    from scipy.stats import t as student

    mean = float(x.mean())
    half = float(student.ppf(0.5 + level / 2, x.size - 1) * x.std(ddof=1) / math.sqrt(x.size))
    low, high = bounds if bounds is not None else (-math.inf, math.inf)
    return Interval(mean, max(mean - half, low), min(mean + half, high), x.size, "t", level=level)


def _bca_interval(x: Floats, level: float, seed: int, resamples: int) -> Interval:
    low, high, undefined = bca_many(x[:, None], level, seed, resamples)
    limits = low.item(), high.item()
    return Interval(float(x.mean()), *limits, x.size, "BCa", None, bool(undefined[0]), level, seed, resamples)


def clopper_pearson(k: int, n: int, level: float = 0.95) -> Interval:
    """Exact interval of a share k/n from beta quantiles (Clopper & Pearson 1934); n = 0 gives [0, 1], flagged."""
    check(level)
    if not is_whole(k) or not is_whole(n) or not 0 <= k <= n:
        raise StatisticsError(f"k={k!r}, n={n!r}: allowed are integers with 0 <= k <= n")
    if n == 0:
        return Interval(math.nan, 0.0, 1.0, 0, "Clopper-Pearson", None, True, level)
    from scipy.stats import beta

    tail = (1 - level) / 2
    low = 0.0 if k == 0 else float(beta.ppf(tail, k, n - k + 1))
    high = 1.0 if k == n else float(beta.ppf(1 - tail, k + 1, n - k))
    return Interval(k / n, low, high, int(n), "Clopper-Pearson", level=level)


def auroc_interval(values: ArrayLike, level: float = 0.95, seed: int = 0, resamples: int = 9999) -> Interval:
    """`mean_interval` of values in [0, 1] (AUROCs, shares) that stays honest when all items agree.

    All n at one value c: the share of items at c is n/n with Clopper-Pearson lower limit L = (alpha/2)^(1/n); any other
    item lies in [0, 1], so the mean lies in [c L, 1 - (1 - c) L]. At c = 1 that is [L, 1], the interval of the share
    itself. `degenerate` stays True and `method` says so. (A c other than 0 or 1 is read off the data, so the level is
    approximate below n = 5.)
    """
    plain = mean_interval(values, level, seed, resamples, bounds=(0.0, 1.0))
    if not plain.degenerate or plain.n < 2:
        return plain
    limit, c = clopper_pearson(plain.n, plain.n, level).low, plain.mean
    method = f"Clopper-Pearson on the share of items at {c:.4g} (all {plain.n} are)"
    return Interval(c, c * limit, 1 - (1 - c) * limit, plain.n, method, plain, True, level)

"""Intervals of a mean, of AUROCs and of shares: scipy, statsmodels, coverage, and what is flagged."""

import math
import warnings

import numpy as np
import pytest
from paired_designs import RNG, lower_band, upper_band

from kvprobe import stats
from kvprobe.errors import StatisticsError


@pytest.mark.parametrize("n", [2, 6, 9, 10, 25])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_intervals_are_scipys(n, level):
    from scipy import stats as sp

    x = np.round(RNG(n).lognormal(size=n) * 64) / 64  # exact sums: scipy lets rounding split resamples at the mean
    result = stats.mean_interval(x, level=level, seed=3, resamples=999)
    boot = sp.bootstrap((x,), np.mean, confidence_level=level, n_resamples=999, method="BCa", rng=RNG(3))
    student = sp.t.interval(level, n - 1, loc=x.mean(), scale=sp.sem(x))
    by_method = {result.method: result, result.beside.method: result.beside}
    assert result.method == ("t" if n < 10 else "BCa")
    assert (by_method["t"].low, by_method["t"].high) == pytest.approx(student, rel=1e-12)
    assert (by_method["BCa"].low, by_method["BCa"].high) == pytest.approx(tuple(boot.confidence_interval), rel=1e-9)
    assert result.mean == result.beside.mean == pytest.approx(x.mean())
    assert not result.degenerate


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_items_are_flagged(n):
    for call in (stats.mean_interval, stats.auroc_interval):
        result = call([0.7] * n)
        assert result.degenerate
        assert math.isnan(result.low)
        assert math.isnan(result.high)
        assert (result.n, "n < 2" in result.method) == (n, True)


@pytest.mark.parametrize("n", [2, 9, 10, 40])
def test_identical_values_are_flagged_not_nan(n):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = stats.mean_interval([0.1 + 0.2] * (n - 1) + [0.3])
    assert result.degenerate
    assert result.low == result.high == result.mean == pytest.approx(0.3)
    assert "identical" in result.method


def test_bounds_clip_and_refuse():
    x = [1.0, 1.0, 0.9, 1.0]
    assert stats.mean_interval(x).high > 1
    assert stats.mean_interval(x, bounds=(0, 1)).high == 1
    assert stats.auroc_interval(x).high == 1
    with pytest.raises(StatisticsError, match=r"\[0.9, 1.1\].*\(0, 1\)"):
        stats.mean_interval([0.9, 1.1], bounds=(0, 1))


def test_undefined_bca_is_flagged():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = stats.mean_interval(np.arange(12.0), resamples=1)
    assert result.method == "t"
    assert result.beside.degenerate
    assert math.isnan(result.beside.low)


@pytest.mark.parametrize("n", [2, 6, 30])
def test_auroc_interval_all_equal(n):
    limit = 0.025 ** (1 / n)
    for c in (1.0, 0.0, 0.5):
        result = stats.auroc_interval([c] * n)
        assert (result.low, result.high) == pytest.approx((c * limit, 1 - (1 - c) * limit))
        assert result.low <= result.mean <= result.high
        assert result.degenerate
        assert f"share of items at {c:.4g}" in result.method
    assert stats.auroc_interval([1.0] * n).low == pytest.approx(stats.clopper_pearson(n, n).low)


def test_auroc_interval_is_mean_interval_otherwise():
    x = RNG(0).uniform(size=11)
    assert stats.auroc_interval(x) == stats.mean_interval(x, bounds=(0.0, 1.0))


@pytest.mark.parametrize(("k", "n"), [(0, 6), (6, 6), (3, 10), (1, 1), (99, 100)])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_clopper_pearson_is_statsmodels(k, n, level):
    from statsmodels.stats.proportion import proportion_confint

    result = stats.clopper_pearson(k, n, level)
    assert (result.low, result.high) == pytest.approx(proportion_confint(k, n, 1 - level, "beta"), abs=1e-10)
    assert result.mean == k / n


def test_clopper_pearson_edges():
    assert stats.clopper_pearson(0, 0).degenerate
    for k, n in ((-1, 3), (4, 3), (1.5, 3), (True, 3)):
        with pytest.raises(StatisticsError, match="0 <= k <= n"):
            stats.clopper_pearson(k, n)


def test_t_interval_covers():
    """95 % t-intervals of 6 normal values cover between the 3.3-sigma binomial bands."""
    from scipy.stats import t

    x = RNG(0).normal(size=(4000, 6))
    half = t.ppf(0.975, 5) * x.std(axis=1, ddof=1) / math.sqrt(6)
    covered = np.mean(np.abs(x.mean(axis=1)) <= half)
    assert lower_band(0.95, 4000) < covered < upper_band(0.95, 4000)
    ours = [stats.mean_interval(row, resamples=9) for row in x[:100]]
    assert [i.high - i.mean for i in ours] == pytest.approx(half[:100])

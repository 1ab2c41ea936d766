"""Ratio of two averages: scipy's BCa over pairs, the linearised t, coverage of a known ratio, edges."""

import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap
from scipy.stats import t as student

from kvprobe import stats
from kvprobe.errors import StatisticsError

RNG = np.random.default_rng


def draw(seed, n, spread=0.4):
    """Positive pairs that go together; the true ratio of their means is 3."""
    rng = RNG(seed)
    bottom = rng.lognormal(0, 0.5, n)
    return 3 * bottom * np.exp(rng.normal(-(spread**2) / 2, spread, n)), bottom


@pytest.mark.parametrize("level", [0.9, 0.95])
@pytest.mark.parametrize(("seed", "n"), [(0, 10), (1, 22), (2, 60)])
def test_it_is_scipys_bca_over_pairs(seed, n, level):
    top, bottom = draw(seed, n)
    found = stats.ratio_interval(top, bottom, level, seed=7, resamples=999)
    truth = bootstrap(
        (top, bottom), lambda x, y: x.mean() / y.mean(), paired=True, vectorized=False, method="BCa",
        confidence_level=level, n_resamples=999, rng=RNG(7),
    ).confidence_interval  # fmt: skip
    assert found.mean == pytest.approx(top.mean() / bottom.mean()) and found.method == "BCa"
    assert (found.low, found.high) == pytest.approx(tuple(truth), rel=1e-9)
    assert (found.n, found.level, found.seed, found.resamples, found.degenerate) == (n, level, 7, 999, False)


@pytest.mark.parametrize("n", [2, 5, 9, 30])
def test_t_is_of_the_linearised_ratio(n):
    """By hand: each item's pull on the ratio, its standard error, Student's quantile."""
    top, bottom = draw(n, n)
    found = stats.ratio_interval(top, bottom)
    t = found if n < 10 else found.beside
    ratio = sum(top) / sum(bottom)
    pull = [(x - ratio * y) * n / sum(bottom) for x, y in zip(top, bottom, strict=True)]
    error = math.sqrt(math.fsum(v * v for v in pull) / (n - 1) / n)
    half = student.ppf(0.975, n - 1) * error
    assert (t.method, t.mean) == ("t", pytest.approx(ratio))
    assert (t.low, t.high) == pytest.approx((ratio - half, ratio + half))


def test_of_the_same_bottom_it_is_the_interval_of_a_mean():
    top, _ = draw(3, 25)
    ratio, mean = stats.ratio_interval(top, np.full(25, 2.0)), stats.mean_interval(top)
    assert (2 * ratio.low, 2 * ratio.mean, 2 * ratio.high) == pytest.approx((mean.low, mean.mean, mean.high))
    few, mean = stats.ratio_interval(top[:6], np.full(6, 2.0)), stats.mean_interval(top[:6])
    assert (2 * few.low, 2 * few.high) == pytest.approx((mean.low, mean.high))


@pytest.mark.parametrize("n", [8, 25])
def test_coverage_of_a_known_ratio(n):
    """95 % intervals of 400 data sets, with 3 standard errors of that count and skewed data's few per cent."""
    hits = 0
    for seed in range(400):
        top, bottom = draw(1000 + seed, n)
        found = stats.ratio_interval(top, bottom, resamples=499)
        hits += found.low <= 3 <= found.high
    assert 0.89 * 400 <= hits <= 0.985 * 400


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.integers(2, 30), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_units_only_scale_it(seed, n, a, b):
    top, bottom = draw(seed, n)
    one, other = (
        stats.ratio_interval(top, bottom, resamples=199),
        stats.ratio_interval(a * top, b * bottom, resamples=199),
    )
    for name in ("mean", "low", "high"):
        assert getattr(other, name) == pytest.approx(a / b * getattr(one, name), rel=1e-7)
    assert one.low <= one.mean <= one.high


def test_it_is_a_ratio_of_averages_and_no_average_of_ratios():
    found = stats.ratio_interval([1.0, 30.0], [1.0, 10.0])
    assert found.mean == pytest.approx(31 / 11)


@pytest.mark.parametrize("n", [2, 9, 40])
def test_the_same_ratio_in_every_item_has_no_width(n):
    bottom = RNG(0).lognormal(size=n)
    found = stats.ratio_interval(0.1 * bottom, bottom)
    assert (found.low, found.high) == (found.mean, found.mean) and found.mean == pytest.approx(0.1)
    assert found.degenerate and found.method.startswith("degenerate")


def test_few_items():
    one = stats.ratio_interval([3.0], [2.0])
    assert one.mean == 1.5 and math.isnan(one.low) and math.isnan(one.high) and one.degenerate
    none = stats.ratio_interval([], [])
    assert math.isnan(none.mean) and none.n == 0
    assert json.loads(json.dumps(one.n)) == 1


@pytest.mark.parametrize(
    ("top", "bottom", "said"),
    [
        ([1.0, 2.0], [1.0], "top has 2 items, bottom 1"),
        ([1.0, 2.0], [1.0, 0.0], "minimum 0: allowed is one number an item in both, and bottom > 0"),
        ([1.0, 2.0], [1.0, -1.0], "minimum -1"),
        ([1.0, np.nan], [1.0, 2.0], "top"),
        ([1.0, 2.0], [1.0, np.inf], "bottom"),
        ([[1.0], [2.0]], [1.0, 2.0], "top"),
    ],
)
def test_refused_in_one_line(top, bottom, said):
    with pytest.raises(StatisticsError, match=said) as caught:
        stats.ratio_interval(top, bottom)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("more", [{"level": 1.5}, {"resamples": 0}, {"seed": -1}])
def test_settings_are_checked(more):
    with pytest.raises(StatisticsError):
        stats.ratio_interval([1.0, 2.0], [1.0, 2.0], **more)


def test_one_far_item_gives_limits_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = stats.ratio_interval([*[1.0] * 19, 1e6], [1.0] * 20)
    assert found.low <= found.mean <= found.high

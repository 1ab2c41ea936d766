"""Many columns: the share with a negative mean against loops and scipy, its coverage; Wilcoxon against the loop."""

import dataclasses
import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paired_designs import RNG, lower_band, upper_band

from kvprobe import stats
from kvprobe.errors import StatisticsError
from kvprobe.stats import checks


def share(x):
    """The statistic, one column and one item after the other."""
    return sum(math.fsum(column) < 0 for column in np.asarray(x).T.tolist()) / np.shape(x)[1]


def dyadic(seed, shape, mean=0.0, columns=None):
    """Multiples of 1/64, whose sums are exact; `columns`: that many copies of a column, with noise."""
    x = RNG(seed).normal(mean, size=shape)
    x = x if columns is None else x[:, [0] * columns] + 0.3 * RNG(seed + 1).normal(size=(shape[0], columns))
    return np.round(x * 64) / 64


@pytest.mark.parametrize("level", [0.9, 0.95])
@pytest.mark.parametrize(("n", "width"), [(2, 3), (7, 40), (22, 270)])
def test_share_is_scipys_bootstrap(n, width, level):
    from scipy.stats import bootstrap

    x = dyadic(n, (n, 1), columns=width) + dyadic(n + 9, (1, width), -0.2)
    result = stats.share_interval(x, level, seed=3, resamples=499)
    items, mean, limits = np.arange(n), share(x), {}
    for method in ("percentile", "basic"):
        boot = bootstrap((items,), lambda i: share(x[i]), confidence_level=level, n_resamples=499, method=method,
                         vectorized=False, rng=RNG(3))  # fmt: skip
        limits[method] = tuple(boot.confidence_interval)
    low, high = (f(*(v[i] for v in limits.values())) for i, f in enumerate((min, max)))
    assert result.interval.mean == mean
    assert (result.interval.low, result.interval.high) == pytest.approx((max(low, 0), min(high, 1)), abs=1e-12)
    assert (result.n_negative, result.n_columns) == (round(mean * width), width)
    assert (result.interval.n, result.interval.level, result.interval.seed, result.interval.resamples) == (
        n, level, 3, 499)  # fmt: skip


@pytest.mark.parametrize("level", [0.9, 0.95])
@pytest.mark.parametrize("seed", range(4))
def test_beside_it_stands_scipys_bca(seed, level):
    from scipy.stats import bootstrap

    x = np.round(RNG(seed).lognormal(0, 1, size=(15, 1)) * RNG(seed + 5).normal(-0.2, 1, size=(15, 60)) * 64) / 64
    boot = bootstrap((np.arange(15),), lambda i: share(x[i]), confidence_level=level, n_resamples=999, method="BCa",
                     vectorized=False, rng=RNG(seed))  # fmt: skip
    beside = stats.share_interval(x, level, seed, 999).interval.beside
    assert (beside.method, beside.degenerate) == ("BCa", False)
    assert (beside.low, beside.high) == pytest.approx(tuple(boot.confidence_interval), abs=1e-12)


def test_chunks_agree(monkeypatch):
    x = RNG(1).normal(-0.1, size=(9, 31))
    whole = stats.share_interval(x, resamples=101)
    monkeypatch.setattr(checks, "TABLE", 31 * 7)
    assert stats.share_interval(x, resamples=101) == whole


def test_zero_means_are_no_negative_ones_and_counted():
    x = np.array([[1.0, 0.1 + 0.2, -1.0, 2.0, 0.0], [-1.0, -0.3, -1.0, 1.0, 0.0]])
    result = stats.share_interval(x, resamples=99)
    assert (result.n_columns, result.n_negative, result.n_zero, result.interval.mean) == (5, 1, 3, 0.2)


def test_rounding_splits_no_zero_of_a_resample():
    tenths, whole = ([[a, -a] for a in v] for v in ((0.1, 0.2, -0.3), (1.0, 2.0, -3.0)))
    assert repr(stats.share_interval(tenths, resamples=999)) == repr(stats.share_interval(whole, resamples=999))


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 12), st.booleans())
def test_negated_values_mirror_the_share(seed, n, width, whole):
    x = RNG(seed).normal(-0.2, size=(n, width))
    x = np.round(x) if whole else x
    up, down = (stats.share_interval(v, resamples=49) for v in (x, -x))
    assert up.n_zero == down.n_zero
    assert up.n_negative + down.n_negative + up.n_zero == width
    if not whole:  # no resample has a mean of 0
        assert (down.interval.low, down.interval.high) == pytest.approx((1 - up.interval.high, 1 - up.interval.low))


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 12))
def test_order_and_copies_of_columns_change_nothing(seed, n, width):
    rng = RNG(seed)
    x = rng.integers(-4, 4, size=(n, width)) / 4
    plain = stats.share_interval(x, resamples=49)
    moved = stats.share_interval(x[:, rng.permutation(width)], resamples=49)
    assert repr(moved) == repr(plain)  # NaN limits included
    items = stats.share_interval(x[rng.permutation(n)], resamples=49)
    assert dataclasses.replace(items, interval=plain.interval) == plain
    assert items.interval.mean == plain.interval.mean
    copies = stats.share_interval(np.tile(x, 3), resamples=49)
    assert (copies.n_negative, copies.n_zero) == (3 * plain.n_negative, 3 * plain.n_zero)
    for limit in ("mean", "low", "high"):
        assert getattr(copies.interval, limit) == pytest.approx(getattr(plain.interval, limit), abs=1e-12)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 30), st.sampled_from([0.0, 0.5, 3.0]))
def test_an_interval_holds_its_share_or_is_flagged(seed, n, width, effect):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        interval = stats.share_interval(RNG(seed).normal(-effect, size=(n, width)), seed=seed, resamples=49).interval
    assert interval.degenerate == (n < 2 or width == 1 or interval.low == interval.high)
    assert math.isnan(interval.low) == math.isnan(interval.high) == (n < 2)
    assert n < 2 or 0 <= interval.low <= interval.mean <= interval.high <= 1
    assert interval.beside is None or math.isnan(interval.beside.low) == interval.beside.degenerate


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_items_are_flagged(n):
    result = stats.share_interval(np.full((n, 4), -1.0))
    assert result.interval.degenerate
    assert math.isnan(result.interval.low)
    assert math.isnan(result.interval.high)
    assert (result.interval.n, "n < 2" in result.interval.method, result.n_columns) == (n, True, 4)
    assert result.n_negative == 4 * n


def test_agreeing_resamples_and_single_columns_are_flagged():
    agreed = stats.share_interval(-1 - RNG(0).uniform(size=(8, 20))).interval
    assert (agreed.mean, agreed.low, agreed.high, agreed.degenerate) == (1, 1, 1, True)
    assert "agree" in agreed.method
    single = stats.share_interval(np.array([[-3.0], [1.0], [2.0], [-1.0], [0.5]]), resamples=199).interval
    assert (single.low, single.high, single.degenerate) == (0, 1, True)
    assert "one column" in single.method


def test_bca_beside_is_flagged_where_all_resamples_lie_on_one_side():
    one = stats.share_interval(RNG(2).normal(-0.1, size=(10, 40)), resamples=1).interval
    assert one.beside.degenerate
    assert math.isnan(one.beside.low)
    assert not one.degenerate


def coverage(true, tau, trials):
    """How often 95 % intervals hold the true share: 12 items, 60 columns that correlate at 0.3, a noise SD of 1."""
    from scipy.special import ndtri

    spread = tau * ndtri((np.arange(60) + 0.5) / 60)
    means, hits, beside = spread - np.quantile(spread, true), 0, 0
    assert np.mean(means < 0) == true
    for seed in range(trials):
        rng = RNG(seed)
        x = means + math.sqrt(0.3) * rng.normal(size=(12, 1)) + math.sqrt(0.7) * rng.normal(size=(12, 60))
        interval = stats.share_interval(x, seed=seed, resamples=399).interval
        hits += interval.low <= true + 1e-9 and true - 1e-9 <= interval.high
        bca = interval.beside or interval
        beside += bca.low <= true + 1e-9 and true - 1e-9 <= bca.high
    return hits / trials, beside / trials


@pytest.mark.parametrize(("true", "tau"), [(0.5, 1.0), (0.8, 1.0), (0.5, 0.4), (0.8, 0.4)])
def test_the_hull_covers_the_true_share_where_means_exceed_their_noise(true, tau):
    covered, _ = coverage(true, tau, 400)
    assert covered >= lower_band(0.93, 400)


def test_no_interval_repairs_means_below_their_noise():
    """Why the docstring warns: at a third of their standard error, a true share of 0.9 looks like two thirds."""
    covered, bca = coverage(0.9, 0.1, 200)
    assert bca < covered < 0.9


def columns(seed, n, width):
    """Without ties, with ties and zeros, with many zeros, all zero, in turn; rounding noise on ties and zeros."""
    rng, x = RNG(seed), RNG(seed).normal(0.2, size=(n, width))
    x[:, 1::4] = np.round(x[:, 1::4] * 4) / 10 * (1 + 4e-16 * rng.integers(0, 2, size=x[:, 1::4].shape))
    x[:, 2::4] *= rng.integers(0, 2, size=x[:, 2::4].shape)
    x[:, 3::8] = 0
    if n:
        x[0, 2::4] = 1e-14
    return x


@pytest.mark.parametrize("n", [0, 1, 2, 9, 50, 51, 60, 120])
def test_wilcoxon_many_is_the_loop(n):
    x = columns(n, n, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        many = stats.wilcoxon_many(x)
    loop = [stats.wilcoxon(column) for column in x.T]
    np.testing.assert_allclose(many.p, [r.p for r in loop], rtol=1e-11)
    np.testing.assert_allclose(many.p_attainable, [r.p_attainable for r in loop], rtol=1e-11)
    assert many.n_zero.tolist() == [r.n_zero for r in loop]
    assert many.exact.tolist() == [r.exact for r in loop]
    assert many.n == n


def test_wilcoxon_many_is_scipys_exact_and_asymptotic_p():
    from scipy.stats import wilcoxon as oracle

    for n, method in ((8, "exact"), (33, "exact"), (50, "exact"), (80, "asymptotic")):
        x = RNG(n).normal(0.3, size=(n, 25))
        many = stats.wilcoxon_many(x)
        np.testing.assert_allclose(many.p, oracle(x, method=method, axis=0).pvalue, rtol=1e-11)
        ends = oracle(np.abs(x), method=method, axis=0).pvalue
        np.testing.assert_allclose(many.p_attainable, ends, rtol=1e-11)
        assert (many.exact == (method == "exact")).all()


def test_wilcoxon_many_adjusts_as_statsmodels():
    from statsmodels.stats.multitest import multipletests

    many = stats.wilcoxon_many(RNG(0).normal(np.linspace(0, 1, 64), size=(22, 64)))
    np.testing.assert_allclose(many.p_bh, multipletests(many.p, method="fdr_bh")[1], rtol=1e-12)
    assert 0 < (many.p_bh <= 0.05).sum() < (many.p <= 0.05).sum()


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(1, 10))
def test_wilcoxon_many_keeps_under_order_sign_and_scale(seed, n, width):
    rng = RNG(seed)
    x = rng.integers(-5, 6, size=(n, width)) / 8
    many, columns = stats.wilcoxon_many(x), rng.permutation(width)
    same = stats.wilcoxon_many(x[rng.permutation(n)] * rng.choice([-0.3, 7.0], size=width))
    for field in ("p", "p_attainable", "p_bh", "n_zero"):
        np.testing.assert_array_equal(getattr(same, field), getattr(many, field))
        moved = getattr(stats.wilcoxon_many(x[:, columns]), field)
        np.testing.assert_array_equal(moved, getattr(many, field)[columns])
    assert (many.p_attainable <= many.p).all()
    assert (many.p <= many.p_bh * (1 + 1e-12)).all()


def test_wilcoxon_many_holds_its_size_and_false_discoveries():
    """Null columns that correlate at 0.5: p <= 0.05 in at most 5 %; with BH, any false discovery in at most 5 %."""
    trials, single, any_false = 300, 0, 0
    for seed in range(trials):
        rng = RNG(seed)
        many = stats.wilcoxon_many(rng.laplace(size=(12, 1)) + rng.laplace(size=(12, 30)))
        single, any_false = single + (many.p[0] <= 0.05), any_false + (many.p_bh <= 0.05).any()
    assert single / trials <= upper_band(0.05, trials)
    assert any_false / trials <= upper_band(0.05, trials)


def test_records_are_frozen_and_plain():
    x = RNG(0).normal(size=(6, 5))
    for result, field in ((stats.share_interval(x, resamples=99), "n_zero"), (stats.wilcoxon_many(x), "p")):
        json.dumps(result.to_dict())
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(result, field, 3)


@pytest.mark.parametrize("call", [stats.share_interval, stats.wilcoxon_many])
@pytest.mark.parametrize(("values", "message"), [
    ([1.0, 2.0], r"values must have 2 axis\(es\), got shape \(2,\)"),
    (np.ones((3, 0)), r"values must hold at least one column, got shape \(3, 0\)"),
    ([[1.0, np.nan]], "1 of 2 values are NaN or infinite"),
    ([["a", "b"]], "values must be numbers"),
])  # fmt: skip
def test_mistakes_are_quoted(call, values, message):
    with pytest.raises(StatisticsError, match=message) as error:
        call(values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [{"level": 95}, {"seed": -1}, {"resamples": 0}])
def test_settings_out_of_range_are_quoted(bad):
    ((name, value),) = bad.items()
    with pytest.raises(StatisticsError, match=f"{name}={value}"):
        stats.share_interval(np.ones((3, 2)), **bad)

"""Laws, oracles and sizes of kvprobe.stats."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe import stats
from kvprobe.errors import StatisticsError

RNG = np.random.default_rng
SCORES = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=9)  # few values, so ties are common
QUICK = settings(max_examples=40, deadline=None)


def make_items(seed, sizes, targets=1, heads=None, draw="normal", ties=False):
    """Exchangeable items: scores drawn alike for every span, target set uniform."""
    rng, scores, masks = RNG(seed), [], []
    for n in sizes:
        shape = n if heads is None else (n, heads)
        values = getattr(rng, draw)(size=shape)
        scores.append(np.round(values) if ties else values)
        masks.append(rng.permutation(np.arange(n) < targets))
    return scores, masks


def within(statistic, w, mask):
    """One item's centred statistic, the slow way."""
    if statistic == "mean_difference":
        return w[mask].mean() - w[~mask].mean()
    pairs = [(a > b) + 0.5 * (a == b) for a in w[mask] for b in w[~mask]]
    return np.mean(pairs) - 0.5


def brute(statistic, scores, masks):
    """All joint assignments: observed T and the array of permuted T."""
    tables = []
    for w, mask in zip(scores, masks, strict=True):
        sets = [np.isin(np.arange(len(w)), c) for c in itertools.combinations(range(len(w)), int(mask.sum()))]
        tables.append([within(statistic, w, chosen) for chosen in sets])
    permuted = np.array([np.mean(choice) for choice in itertools.product(*tables)])
    return np.mean([within(statistic, w, m) for w, m in zip(scores, masks, strict=True)]), permuted


def upper_band(rate, trials, z=3.3):
    return rate + z * math.sqrt(rate * (1 - rate) / trials)


def lower_band(rate, trials, z=3.3):
    return rate - z * math.sqrt(rate * (1 - rate) / trials)


# ------------------------------------------------------------------------------------------------------------ AUROC


@QUICK
@given(SCORES, SCORES)
def test_auroc_is_sklearn(positive, negative):
    from sklearn.metrics import roc_auc_score

    expected = roc_auc_score([1] * len(positive) + [0] * len(negative), positive + negative)
    assert stats.auroc(positive, negative) == pytest.approx(expected, abs=1e-12)


@QUICK
@given(SCORES, SCORES)
def test_auroc_laws(positive, negative):
    p, n = np.array(positive), np.array(negative)
    value = stats.auroc(p, n)
    assert value + stats.auroc(n, p) == pytest.approx(1, abs=1e-15)
    assert value == pytest.approx(1 - stats.auroc(-p, -n), abs=1e-15)
    assert value == stats.auroc(np.exp(p), np.exp(n)) == stats.auroc(p[::-1], n[::-1])
    assert value == pytest.approx(stats.auroc(p**3 + p, n**3 + n))


def test_auroc_hand():
    assert stats.auroc([2, 1], [1, 0]) == 3.5 / 4
    assert stats.auroc([np.inf, 0], [-np.inf, 0]) == 3.5 / 4
    assert math.isnan(stats.auroc([], [1.0]))
    assert math.isnan(stats.auroc([1.0], []))


@pytest.mark.parametrize(("p", "n"), [(1, 20), (20, 1), (7, 7), (13, 4)])
def test_auroc_many_is_auroc(p, n):
    rng = RNG(p)
    pos, neg = rng.integers(0, 5, (p, 3, 11)).astype(float), rng.integers(0, 5, (n, 3, 11)).astype(float)
    many = stats.auroc_many(pos, neg)
    assert many.shape == (3, 11)
    for i, j in np.ndindex(3, 11):
        assert many[i, j] == stats.auroc(pos[:, i, j], neg[:, i, j])


def test_auroc_many_empty_and_shapes():
    assert np.isnan(stats.auroc_many(np.empty((0, 4)), np.ones((3, 4)))).all()
    with pytest.raises(StatisticsError, match=r"\(2, 4\).*\(3, 5\)"):
        stats.auroc_many(np.ones((2, 4)), np.ones((3, 5)))


@pytest.mark.parametrize("call", [stats.auroc, stats.auroc_many])
def test_auroc_refuses_nan(call):
    with pytest.raises(StatisticsError, match="1 of 2 values are NaN"):
        call([0.0, np.nan], [1.0])


def test_item_auroc_excludes_and_counts_single_class():
    result = stats.item_auroc([([1], [0]), ([], [0, 1]), ([0], [1, 0]), ([1], [])])
    assert result.values.tolist() == [1.0, 0.25]
    assert (result.kept.tolist(), result.n, result.n_excluded) == ([0, 2], 2, 2)
    assert stats.item_auroc([]).n == 0


# -------------------------------------------------------------------------------------------------------- intervals


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


def test_bca_many_is_bca_of_each_column():
    x = RNG(0).exponential(size=(12, 7))
    x[:, 3] = 0.3
    low, high, degenerate = stats.bca_many(x, seed=5, resamples=499)
    assert degenerate.tolist() == [j == 3 for j in range(7)]
    for j in range(7):
        one = stats.mean_interval(x[:, j], seed=5, resamples=499)
        assert (low[j], high[j]) == pytest.approx((one.low, one.high), rel=1e-12)
    assert np.isnan(stats.bca_many(x[:1])[0]).all()


def test_bca_many_chunks_agree(monkeypatch):
    x = RNG(1).normal(size=(10, 9))
    whole = stats.bca_many(x, resamples=199)
    monkeypatch.setattr(stats, "_TABLE", 2 * 199)
    for a, b in zip(whole, stats.bca_many(x, resamples=199), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


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


# ---------------------------------------------------------------------------------------------- permutation, exact

DESIGNS = [((4, 4, 4), 1), ((3, 5, 2), 1), ((5, 4), 2), ((6,), 3), ((2, 2, 2, 2), 1), ((7, 3), 2)]


@pytest.mark.parametrize("statistic", ["mean_difference", "auroc"])
@pytest.mark.parametrize(("sizes", "targets"), DESIGNS)
@pytest.mark.parametrize("ties", [False, True])
def test_permutation_is_enumeration(statistic, sizes, targets, ties):
    for seed in range(6):
        scores, masks = make_items(seed, sizes, targets, ties=ties)
        result = stats.permutation_within_item(scores, masks, statistic)
        t, permuted = brute(statistic, scores, masks)
        extreme = np.abs(permuted).max()
        assert result.exact
        assert result.statistic == pytest.approx(t + (0.5 if statistic == "auroc" else 0))
        assert result.p == pytest.approx(np.mean(np.abs(permuted) >= abs(t) - 1e-10), abs=1e-12)
        assert result.p_attainable == pytest.approx(np.mean(np.abs(permuted) >= extreme - 1e-10), abs=1e-12)
        assert result.p >= result.p_attainable
        assert result.cannot_reject_at == (result.p_attainable > 0.05)
        assert permuted.mean() == pytest.approx(0, abs=1e-12)  # what the statistic is centred on


def test_permutation_is_scipys():
    from scipy.stats import permutation_test

    scores, masks = make_items(2, (9,), 3)
    pair = (scores[0][masks[0]], scores[0][~masks[0]])
    oracle = permutation_test(pair, lambda a, b: abs(np.mean(a) - np.mean(b)), alternative="greater", n_resamples=1e5)
    assert stats.permutation_within_item(scores, masks).p == pytest.approx(oracle.pvalue)


def test_attainable_p_of_generic_data():
    scores, masks = make_items(0, (21,) * 6)
    auroc = stats.permutation_within_item(scores, masks, "auroc")
    assert auroc.exact  # a lattice: no Monte Carlo, though there are 8.6e7 assignments
    assert auroc.p_attainable == pytest.approx(2 / 21**6, rel=1e-12)
    scores, masks = make_items(0, (5,) * 4)
    assert stats.permutation_within_item(scores, masks).p_attainable == 1 / 5**4
    scores, masks = make_items(0, (20,))
    one = stats.permutation_within_item(scores, masks)
    assert (one.p_attainable, one.cannot_reject_at) == (0.05, False)  # exactly the level: counts are whole numbers
    scores, masks = make_items(0, (4, 4))
    assert stats.permutation_within_item(scores, masks, "auroc").cannot_reject_at  # 2/16


def test_perfect_separation_attains_the_smallest_p():
    scores = [np.arange(21.0)] * 6
    masks = [np.arange(21) == 20] * 6
    result = stats.permutation_within_item(scores, masks, "auroc")
    assert result.statistic == 1
    assert result.p == result.p_attainable == pytest.approx(2 / 21**6)


@pytest.mark.parametrize("statistic", ["mean_difference", "auroc"])
def test_float_noise_does_not_split_ties(statistic):
    """0.1 + 0.2 differs from 0.3 in the last bit; so do sums in another order. Neither may change p."""
    scores = [np.array([0.3, 0.1, 0.2]), np.array([0.1, 0.3, 0.2]), np.array([0.2, 0.1, 0.3])]
    masks = [np.array([True, False, False])] * 3
    whole = [np.round(w * 10) for w in scores]
    noisy, clean = (stats.permutation_within_item(s, masks, statistic) for s in (scores, whole))
    assert (noisy.p, noisy.p_attainable) == (clean.p, clean.p_attainable)
    moved = stats.permutation_within_item([w + 1000.1 for w in scores], masks, statistic)
    assert moved.p == clean.p


def test_observed_zero_has_p_one():
    scores = [np.array([0.1, 0.2, 0.3]), np.array([0.3, 0.2, 0.1])]
    masks = [np.array([True, False, False])] * 2
    assert stats.permutation_within_item(scores, masks).p == 1


@pytest.mark.parametrize("statistic", ["mean_difference", "auroc"])
@pytest.mark.parametrize(("sizes", "targets"), [((5, 4, 6, 5), 1), ((6, 5, 7), 2)])
def test_monte_carlo_agrees_with_exact(statistic, sizes, targets):
    scores, masks = make_items(1, sizes, targets)
    exact = stats.permutation_within_item(scores, masks, statistic)
    drawn = stats.permutation_within_item(scores, masks, statistic, draws=20_000, seed=4, exact_limit=1)
    assert (exact.exact, drawn.exact) == (True, False)
    assert drawn.statistic == exact.statistic
    assert abs(drawn.p - exact.p) < 5 * math.sqrt(exact.p * (1 - exact.p) / 20_000) + 1e-4
    assert drawn.p_attainable == pytest.approx(max(exact.p_attainable, 1 / 20_001))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("statistic", ["mean_difference", "auroc"])
def test_extreme_share_is_enumeration(statistic, ties):
    """The closed form used for Monte Carlo equals the enumerated share at the extreme."""
    for seed, (sizes, targets) in itertools.product(range(4), DESIGNS):
        scores, masks = make_items(seed, sizes, targets, ties=ties)
        few = stats.permutation_within_item(scores, masks, statistic, draws=50, exact_limit=1)
        exact = stats.permutation_within_item(scores, masks, statistic)
        assert few.p_attainable == pytest.approx(max(exact.p_attainable, 1 / 51))
        assert few.p >= few.p_attainable


def test_monte_carlo_draws_every_subset_alike():
    design = stats._design([np.arange(5.0)], [np.array([1, 1, 0, 0, 0])], "auroc", ndim=1)
    chosen = np.sort(stats._draw(design, 0, 20_000)[0], axis=1)
    _, counts = np.unique(chosen, axis=0, return_counts=True)
    assert len(counts) == 10
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9  # chi2(9), 0.1 %


def test_monte_carlo_is_seeded_and_p_is_never_zero():
    scores, masks = [np.arange(30.0)] * 12, [np.arange(30) >= 28] * 12
    a, b = (stats.permutation_within_item(scores, masks, draws=499, seed=7, exact_limit=10) for _ in range(2))
    assert a == b
    assert a.p == 1 / 500 == a.p_attainable
    assert (a.seed, a.draws) == (7, 499)


@QUICK
@given(st.lists(st.lists(st.integers(-3, 3), min_size=2, max_size=5), min_size=1, max_size=4), st.randoms())
def test_permutation_laws(items, random):
    scores = [np.array(w, dtype=float) for w in items]
    masks = [np.arange(len(w)) == random.randrange(len(w)) for w in scores]
    for statistic in ("mean_difference", "auroc"):
        result = stats.permutation_within_item(scores, masks, statistic)
        order = random.sample(range(len(scores)), len(scores))
        shuffled = stats.permutation_within_item([scores[i] for i in order], [masks[i] for i in order], statistic)
        negated = stats.permutation_within_item([-w for w in scores], masks, statistic)
        assert result.p == pytest.approx(shuffled.p) == pytest.approx(negated.p)
        assert 0 < result.p_attainable <= result.p <= 1
    monotone = stats.permutation_within_item([np.exp(w) for w in scores], masks, "auroc")
    assert monotone == result
    affine = stats.permutation_within_item([3 * w + 7 for w in scores], masks)
    assert affine.p == pytest.approx(stats.permutation_within_item(scores, masks).p)


def test_complement_of_the_target_gives_the_same_p():
    scores, masks = make_items(3, (5, 6, 4), 2)
    for statistic in ("mean_difference", "auroc"):
        one = stats.permutation_within_item(scores, masks, statistic)
        other = stats.permutation_within_item(scores, [~m for m in masks], statistic)
        assert one.p == pytest.approx(other.p)


def test_single_class_items_are_excluded_and_counted():
    scores, masks = make_items(0, (4, 4, 4))
    more = stats.permutation_within_item([*scores, np.ones(3), np.ones(2)], [*masks, np.ones(3), np.zeros(2)])
    alone = stats.permutation_within_item(scores, masks)
    assert (more.n, more.n_excluded) == (3, 2)
    assert (more.p, more.statistic) == (alone.p, alone.statistic)
    none = stats.permutation_within_item([np.ones(3)], [np.ones(3)])
    assert (none.p, none.n, none.n_excluded, none.cannot_reject_at) == (1, 0, 1, True)
    assert math.isnan(none.statistic)


@pytest.mark.parametrize("exact_limit", [1, 100_000])
def test_constant_scores_cannot_reject(exact_limit):
    result = stats.permutation_within_item(
        [np.full(4, 0.1)] * 8, [np.arange(4) == 1] * 8, draws=99, exact_limit=exact_limit
    )
    assert (result.p, result.p_attainable, result.degenerate, result.cannot_reject_at) == (1, 1, True, True)


def test_uneven_items_without_a_common_lattice_still_work():
    scores, masks = make_items(0, (17, 19, 23, 29, 31, 37, 41, 43))
    result = stats.permutation_within_item(scores, masks, "auroc", draws=999)
    assert not result.exact
    assert 0 < result.p <= 1


def test_large_designs_do_not_overflow():
    scores, masks = make_items(0, (21,) * 100)
    assert 0 < stats.permutation_within_item(scores, masks, "auroc").p <= 1
    scores, masks = make_items(0, (21,) * 300)
    assert 0 < stats.permutation_within_item(scores, masks, draws=99).p <= 1


@pytest.mark.parametrize("bad", [
    lambda: stats.permutation_within_item([[1, 2]], [[True, False]], "median"),
    lambda: stats.permutation_within_item([[1, 2]], []),
    lambda: stats.permutation_within_item([[1, 2]], [[True]]),
    lambda: stats.permutation_within_item([[1, 2]], [[2, 0]]),
    lambda: stats.permutation_within_item([[1, np.nan]], [[1, 0]], "auroc"),
    lambda: stats.permutation_within_item([[1, np.inf]], [[1, 0]]),
    lambda: stats.permutation_within_item([[[1, 2]]], [[1, 0]]),
    lambda: stats.permutation_within_item([[1, 2]], [[1, 0]], seed=None),
    lambda: stats.permutation_within_item([[1, 2]], [[1, 0]], draws=0),
    lambda: stats.max_t_within_item([], []),
    lambda: stats.max_t_within_item([np.ones((2, 3)), np.ones((2, 4))], [[1, 0]] * 2),
    lambda: stats.max_t_within_item([np.ones((2, 0))], [[1, 0]]),
    lambda: stats.mean_interval([1, np.nan]),
    lambda: stats.mean_interval([[1.0]]),
    lambda: stats.mean_interval(["a"]),
    lambda: stats.mean_interval([1, 2], level=95),
    lambda: stats.mean_interval([1, 2], seed=1.5),
    lambda: stats.auroc_interval([0.5, 1.2]),
    lambda: stats.sign_flip([np.nan]),
    lambda: stats.holm([0.1, np.nan]),
    lambda: stats.benjamini_hochberg([np.nan]),
    lambda: stats.holm([0.1, 1.2]),
    lambda: stats.cannot_reject(0.1, 0.05, family=0),
])  # fmt: skip
def test_mistakes_are_quoted(bad):
    with pytest.raises(StatisticsError):
        bad()


# ------------------------------------------------------------------------------------------------------------ max-T


@pytest.mark.parametrize("statistic", ["mean_difference", "auroc"])
@pytest.mark.parametrize(("sizes", "targets"), [((4, 4, 3), 1), ((5, 4), 2)])
def test_max_t_is_enumeration(statistic, sizes, targets):
    scores, masks = make_items(5, sizes, targets, heads=6)
    scores = [np.where(np.arange(6) == 4, np.round(w), w) for w in scores]  # one head with ties
    result = stats.max_t_within_item(scores, masks, statistic)
    pairs = [brute(statistic, [w[:, h] for w in scores], masks) for h in range(6)]
    z = np.array([t / permuted.std() for t, permuted in pairs])
    every = np.array([permuted / permuted.std() for _, permuted in pairs])
    assert result.exact
    np.testing.assert_allclose(result.z, z, rtol=1e-10, atol=1e-12)  # closed-form standard deviation
    np.testing.assert_allclose(result.p, [np.mean(np.abs(every).max(0) >= abs(v) - 1e-9) for v in z])
    np.testing.assert_allclose(
        result.p_unadjusted, [np.mean(np.abs(e) >= abs(v) - 1e-9) for e, v in zip(every, z, strict=True)]
    )
    peak = np.abs(every).max(0)
    assert result.p_attainable == pytest.approx(np.mean(peak >= peak.max() - 1e-9))


@pytest.mark.parametrize("statistic", ["mean_difference", "auroc"])
@pytest.mark.parametrize("exact_limit", [1, 20_000])
def test_max_t_of_one_head_is_the_primary_test(statistic, exact_limit):
    """Same seed, same draws: the family's unadjusted p is the head's own test, and one head needs no adjustment."""
    scores, masks = make_items(6, (4, 5, 4, 6), heads=5)
    family = stats.max_t_within_item(scores, masks, statistic, draws=499, exact_limit=exact_limit)
    for h in range(5):
        own = stats.permutation_within_item(
            [w[:, h] for w in scores], masks, statistic, draws=499, exact_limit=1 if exact_limit == 1 else 10**6
        )
        assert family.p_unadjusted[h] == pytest.approx(own.p)
        assert family.statistic[h] == pytest.approx(own.statistic)
        single = stats.max_t_within_item([w[:, [h]] for w in scores], masks, statistic, 0, 499, exact_limit)
        assert single.p[0] == pytest.approx(own.p)
    assert (family.p >= family.p_unadjusted - 1e-12).all()
    assert (family.p <= np.minimum(1, 5 * family.p_unadjusted) + 1e-9).all() or exact_limit == 1


def test_max_t_chunks_agree(monkeypatch):
    family = make_items(7, (6,) * 7, 2, heads=8)
    whole = stats.max_t_within_item(*family, draws=300)
    monkeypatch.setattr(stats, "_TABLE", 100)
    parts = stats.max_t_within_item(*family, draws=300)
    assert not whole.exact
    np.testing.assert_array_equal(whole.p, parts.p)
    np.testing.assert_array_equal(whole.p_unadjusted, parts.p_unadjusted)


def test_max_t_head_without_variation():
    scores, masks = make_items(8, (5, 5, 5), heads=4)
    for w in scores:
        w[:, 2] = 0.3
        w[0, 2] = 0.1 + 0.2  # rounding is not variation
    result = stats.max_t_within_item(scores, masks, "mean_difference")
    without = stats.max_t_within_item([np.delete(w, 2, axis=1) for w in scores], masks, "mean_difference")
    assert result.degenerate.tolist() == [False, False, True, False]
    assert (result.p[2], result.p_unadjusted[2], result.z[2]) == (1, 1, 0)
    np.testing.assert_allclose(np.delete(result.p, 2), without.p)
    flat = stats.max_t_within_item([np.ones((4, 3))] * 6, [np.arange(4) == 0] * 6, draws=50)
    assert (flat.p == 1).all()
    assert flat.cannot_reject_at
    assert flat.p_attainable == 1
    none = stats.max_t_within_item([np.ones((2, 3))], [[1, 1]])
    assert (none.n, none.n_excluded, none.p.tolist()) == (0, 1, [1, 1, 1])


@pytest.mark.parametrize("statistic", ["mean_difference", "auroc"])
def test_max_t_p_is_never_below_the_attainable(statistic):
    scores, masks = [np.eye(3)[:, [0, 0]]] * 2, [np.arange(3) == 0] * 2  # 1/9 of the assignments is most extreme
    for seed in range(30):
        result = stats.max_t_within_item(scores, masks, statistic, seed=seed, draws=20, exact_limit=1)
        assert (result.p >= result.p_attainable).all()
        assert result.p_attainable == pytest.approx(1 / 9)
        assert result.cannot_reject_at


def test_max_t_finds_the_planted_head():
    scores, masks = make_items(9, (9,) * 8, heads=50)
    for w, mask in zip(scores, masks, strict=True):
        w[mask, 17] += 5
    result = stats.max_t_within_item(scores, masks, draws=999)
    assert np.flatnonzero(result.p <= 0.05).tolist() == [17]
    assert result.p[17] == result.p_attainable == 1 / 1000


def test_max_t_is_quick_for_a_large_model():
    """1024 heads, 25 items, 21 spans: bounded memory, seconds."""
    scores, masks = make_items(0, (21,) * 25, heads=1024)
    assert stats.max_t_within_item(scores, masks, draws=500).p.shape == (1024,)


# ------------------------------------------------------------------------------------------- size under the null


@pytest.mark.parametrize("draw", ["normal", "standard_cauchy", "exponential"])
@pytest.mark.parametrize("statistic", ["mean_difference", "auroc"])
def test_primary_test_has_its_attainable_size(draw, statistic):
    """5 items x 4 spans, 600 draws: P(p <= 0.05) is the largest attainable p <= 0.05 for continuous scores."""
    trials, sizes = 600, (4,) * 5
    p = [stats.permutation_within_item(*make_items(s, sizes, draw=draw), statistic).p for s in range(trials)]
    rate = np.mean(np.array(p) <= 0.05)
    assert rate <= upper_band(0.05, trials)
    if statistic == "mean_difference":  # generic: p is uniform on multiples of 1/1024
        assert rate >= lower_band(math.floor(0.05 * 1024) / 1024, trials)


def test_monte_carlo_test_has_its_size():
    trials = 800
    p = [
        stats.permutation_within_item(*make_items(s, (6,) * 8, 2), draws=99, seed=s, exact_limit=1).p
        for s in range(trials)
    ]
    rate = np.mean(np.array(p) <= 0.05)
    assert lower_band(0.05, trials) <= rate <= upper_band(0.05, trials)


def test_max_t_controls_the_family():
    """20 correlated heads under the null: P(any adjusted p <= 0.05) stays within the band, and is not lax."""
    trials, hits = 300, 0
    for s in range(trials):
        scores, masks = make_items(s, (4,) * 5, heads=20)
        scores = [w + 0.8 * w[:, :1] for w in scores]
        hits += stats.max_t_within_item(scores, masks, "mean_difference").p.min() <= 0.05
    assert lower_band(0.05, trials) <= hits / trials <= upper_band(0.05, trials)


def test_sign_flip_is_oversized_for_skewed_outcomes_and_the_primary_test_is_not():
    """The reason for the primary test: target and 8 placebos exchangeable and log-normal, 8 items."""
    trials, flips, primary = 1200, [], []
    for s in range(trials):
        effects = RNG(s).lognormal(size=(8, 9))
        flips.append(stats.sign_flip(effects[:, 0] - effects[:, 1:].mean(axis=1)).p)
        if s < 400:
            primary.append(stats.permutation_within_item(effects, [np.arange(9) == 0] * 8, draws=199, seed=s).p)
    assert 0.08 < np.mean(np.array(flips) <= 0.05) < 0.14
    assert np.mean(np.array(primary) <= 0.05) <= upper_band(0.05, 400)


def test_sign_tests_have_their_size_when_symmetric():
    trials = 1000
    d = RNG(0).laplace(size=(trials, 7))
    flip = np.mean([stats.sign_flip(row).p <= 0.05 for row in d])
    rank = np.mean([stats.wilcoxon(row).p <= 0.05 for row in d])
    size = math.floor(0.05 * 64) / 64  # two-sided p is a multiple of 2/128
    assert lower_band(size, trials) <= flip <= upper_band(size, trials)
    assert rank <= upper_band(0.05, trials)


# ----------------------------------------------------------------------------------------------- sign flip, wilcoxon


@pytest.mark.parametrize("n", [1, 3, 6, 9])
def test_sign_flip_is_enumeration(n):
    for seed in range(5):
        d = np.round(RNG(seed).normal(size=n), 1 if seed % 2 else 8)
        flips = np.array(list(itertools.product((-1, 1), repeat=n))) @ d
        result = stats.sign_flip(d)
        assert result.p == pytest.approx(np.mean(np.abs(flips) >= abs(d.sum()) - 1e-12))
        assert result.p_attainable == 2 / 2 ** np.count_nonzero(d)
        assert result.exact
        assert result.statistic == pytest.approx(d.mean())


def test_sign_flip_is_scipys():
    from scipy.stats import permutation_test

    d = RNG(3).normal(size=8)
    oracle = permutation_test((d,), lambda x: abs(np.mean(x)), permutation_type="samples", alternative="greater")
    assert stats.sign_flip(d).p == pytest.approx(oracle.pvalue)


def test_sign_flip_attainable_and_zeros():
    six = stats.sign_flip([1, 2, 3, 4, 5, 6])
    assert (six.p, six.p_attainable, six.cannot_reject_at) == (2 / 64, 2 / 64, False)
    zeros = stats.sign_flip([1, 2, 3, 0, 0, 0])
    assert (zeros.p, zeros.p_attainable, zeros.n, zeros.n_zero) == (0.25, 0.25, 6, 3)
    assert zeros.cannot_reject_at
    assert "3 of 6 differences zero" in zeros.method


def test_sign_flip_monte_carlo():
    d = RNG(4).normal(0.25, size=18)
    result = stats.sign_flip(d, draws=20_000)
    assert not result.exact
    signs = 1 - 2 * ((np.arange(2**18)[:, None] >> np.arange(18)) & 1)
    p = np.mean(np.abs(signs @ d) >= abs(d.sum()) - 1e-12)
    assert abs(result.p - p) < 5 * math.sqrt(p * (1 - p) / 20_000)
    assert result.p_attainable == 1 / 20_001
    assert stats.sign_flip(np.arange(1.0, 18.0), draws=200_000).p_attainable == 2 / 2**17


@pytest.mark.parametrize("test", [stats.sign_flip, stats.wilcoxon])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_all_zero_differences(test, n):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = test(np.zeros(n))
    assert (result.p, result.p_attainable, result.n, result.n_zero) == (1, 1, n, n)
    assert result.degenerate
    assert result.cannot_reject_at


def test_wilcoxon_is_enumeration_with_and_without_ties():
    from scipy.stats import rankdata
    from scipy.stats import wilcoxon as oracle

    for seed in range(8):
        d = RNG(seed).normal(size=8)
        d = np.round(d * 2) / 10 if seed % 2 else d
        live = d[d != 0]
        ranks = rankdata(np.round(np.abs(live), 9))
        flips = np.array(list(itertools.product((-1, 1), repeat=live.size))) @ ranks
        result = stats.wilcoxon(d)
        assert result.p == pytest.approx(np.mean(np.abs(flips) >= abs(ranks @ np.sign(live)) - 1e-9))
        assert result.p_attainable == pytest.approx(2 / 2**live.size)
        assert result.exact
        assert (result.statistic, result.p) == pytest.approx(tuple(oracle(live)))


@pytest.mark.parametrize("n", [20, 50])
def test_wilcoxon_is_scipys_exact_p(n):
    from scipy.stats import wilcoxon as oracle

    d = RNG(n).normal(0.3, size=n)
    ours = stats.wilcoxon(d)
    assert (ours.statistic, ours.p) == pytest.approx(tuple(oracle(d, method="exact")))
    assert ours.exact
    assert ours.p_attainable == pytest.approx(2 / 2**n)


def test_wilcoxon_large_is_scipys_asymptotic_p():
    from scipy.stats import wilcoxon as oracle

    d = np.round(RNG(0).normal(0.2, 1, size=80), 1)
    large = stats.wilcoxon(d)
    assert not large.exact
    assert "asymptotic" in large.method
    assert (large.statistic, large.p) == pytest.approx(tuple(oracle(d[d != 0], method="asymptotic")))
    assert 0 < large.p_attainable < large.p


def test_wilcoxon_noise_does_not_split_ties():
    assert stats.wilcoxon([0.1 + 0.2, -0.3, 0.5]).p == stats.wilcoxon([0.3, -0.3, 0.5]).p


# ------------------------------------------------------------------------------------------------------- corrections


@QUICK
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_corrections_are_statsmodels(p):
    from statsmodels.stats.multitest import multipletests

    np.testing.assert_allclose(stats.holm(p), multipletests(p, method="holm")[1], atol=1e-15)
    np.testing.assert_allclose(stats.benjamini_hochberg(p), multipletests(p, method="fdr_bh")[1], atol=1e-15)
    assert (stats.holm(p) >= stats.benjamini_hochberg(p) - 1e-15).all()


def test_corrections_of_nothing():
    assert stats.holm([]).size == stats.benjamini_hochberg([]).size == 0


def test_cannot_reject():
    assert not stats.cannot_reject(0.05)
    assert stats.cannot_reject(0.0501)
    assert not stats.cannot_reject(2 / 64, 0.05)
    assert stats.cannot_reject(2 / 64, 0.05, family=2)
    assert stats.cannot_reject(0.02, 0.01)


# ----------------------------------------------------------------------------------------------------------- results


def test_results_are_frozen_and_plain():
    scores, masks = make_items(0, (4, 4, 4), heads=3)
    results = [
        stats.mean_interval([0.1, 0.5, 0.2]),
        stats.item_auroc([([1], [0])]),
        stats.max_t_within_item(scores, masks),
        stats.permutation_within_item([w[:, 0] for w in scores], masks),
    ]
    for result in results:
        json.dumps(result.to_dict())
        with pytest.raises(dataclasses.FrozenInstanceError):
            result.n = 3
    assert results[0].to_dict()["beside"]["method"] == "BCa"


def test_no_global_state():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    scores, masks = make_items(0, (6,) * 9)
    first = stats.permutation_within_item(scores, masks, draws=99, seed=1)
    kept = [w.copy() for w in scores]
    assert first == stats.permutation_within_item(scores, masks, draws=99, seed=1)
    stats.mean_interval(np.arange(12.0))
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    assert all((a == b).all() for a, b in zip(kept, scores, strict=True))


def test_import_is_cheap():
    heavy = "[m for m in ('scipy', 'pandas', 'torch') if m in sys.modules]"
    code = f"import sys, kvprobe.stats, kvprobe.boards; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

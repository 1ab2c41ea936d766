"""The primary test: enumeration, laws, Monte Carlo, and its size under the null."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paired_designs import brute, lower_band, make_items, upper_band

from kvprobe import stats

QUICK = settings(max_examples=40, deadline=None)
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


@pytest.mark.slow
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

"""Sign flip and Wilcoxon: enumeration, scipy, zeros and ties, and their size under the null."""

import itertools
import math
import warnings

import numpy as np
import pytest
from paired_designs import RNG, lower_band, upper_band

from kvprobe import stats


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


def test_sign_flip_draws_signs_of_size_one():
    """100 and eight pairs of +-1: |sum| reaches 100 where the small signs cancel or side with the large one, p = 0.598.

    Signs of -0.9 and +1.1 add a tenth of the observed sum, here 10, to every draw: then p is 0.5, whichever the seed.
    """
    draws, cancel = 20_000, math.comb(16, 8) / 2**16
    result = stats.sign_flip([100.0] + [1.0, -1.0] * 8, draws=draws)
    p = (1 + cancel) / 2
    assert not result.exact
    assert abs(result.p - p) < 5 * math.sqrt(p * (1 - p) / draws)


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

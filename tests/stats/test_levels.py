"""Attainable levels: every assignment of the target enumerated; bands: the binomial law summed."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from kvprobe import stats
from kvprobe.errors import StatisticsError


def rate(sizes, alpha, strict=False, statistic="mean_difference", **how):
    """P(p <= alpha) of the test itself: the target placed on every span of every item in turn."""
    rng = np.random.default_rng(3)
    scores = [rng.normal(size=m) for m in sizes]
    p = [
        stats.permutation_within_item(scores, [np.arange(m) == at for m, at in zip(sizes, where, strict=True)], **how).p
        for where in itertools.product(*(range(m) for m in sizes))
    ]
    return np.mean([value < alpha if strict else value <= alpha for value in p])


DESIGNS = [(5, 5), (3, 3, 3, 3), (2,) * 7, (2, 2, 3, 2, 2), (20,), (4, 1, 6), (2, 2), (7,)]


@pytest.mark.parametrize("sizes", DESIGNS)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.25])
def test_the_level_is_the_rate_over_all_assignments(sizes, alpha, strict):
    assert stats.attainable_level(len(sizes), sizes, alpha, strict=strict) == pytest.approx(rate(sizes, alpha, strict))


def test_known_levels():
    level = stats.attainable_level
    assert level(12, 5) == pytest.approx(0.05, abs=1e-8) and level(12, 5) <= 0.05
    assert level(1, 20) == 0.05 and level(1, 20, strict=True) == 0  # 1/20 is 0.05, which the double is not
    assert level(1, 5) == 0 == level(3, 1)
    assert level(6, 2) == 1 / 32 and level(5, 2) == 0  # a sign flip's 2/2^n
    assert level(2, 5) == 1 / 25 and level(2, np.array([5, 5])) == 1 / 25
    assert level(400, 5) == pytest.approx(0.05)  # 5^400 is no double


@pytest.mark.parametrize(("n", "m"), [(1, 7), (2, 5), (3, 4), (5, 3), (4, 2)])
def test_it_never_exceeds_alpha_and_is_its_largest_multiple(n, m):
    count = m**n // (2 if m == 2 else 1)
    for alpha in (0.01, 0.05, 0.2, 0.5):
        level = Fraction(stats.attainable_level(n, m, alpha)).limit_denominator(count)
        assert level <= Fraction(repr(alpha)) < level + Fraction(1, count)


@pytest.mark.parametrize("draws", [19, 99, 101, 999])
@pytest.mark.parametrize("count", [(6,), (5, 5), (3, 3, 3)])
def test_monte_carlo_is_the_mean_over_all_true_p(count, draws):
    n = math.prod(count)
    most = draws + 1
    expected = 0.0
    for j in range(1, n + 1):
        q = j / n
        for b in range(draws + 1):
            if max((b + 1) / most, 1 / n) <= 0.05 + 1e-12:
                expected += math.comb(draws, b) * q**b * (1 - q) ** (draws - b) / n
    assert stats.attainable_level(len(count), count, draws=draws) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_monte_carlo_of_the_test_itself_has_that_level():
    found = [rate((5, 5), 0.2, draws=39, exact_limit=1, seed=seed) for seed in range(40)]
    level = stats.attainable_level(2, 5, 0.2, draws=39)
    assert np.mean(found) == pytest.approx(level, abs=4 * np.std(found, ddof=1) / math.sqrt(40))
    assert abs(level - stats.attainable_level(2, 5, 0.2)) > 0.005  # which the exact level is told from


@pytest.mark.parametrize("draws", [99, 9999])
def test_many_assignments_continue_the_sum(draws, monkeypatch):
    whole = stats.attainable_level(10, 4, draws=draws)
    monkeypatch.setattr("kvprobe.stats.levels.MOST", 10)
    assert stats.attainable_level(10, 4, draws=draws) == pytest.approx(whole, abs=1e-9)
    assert stats.attainable_level(50, 5, draws=draws) == pytest.approx(0.05)
    assert stats.attainable_level(50, 5, draws=10) == 0  # 1/11 is above 0.05


@pytest.mark.parametrize(("level", "draws"), [(0.05, 1000), (0.04, 100), (0.5, 7), (0.001, 50)])
@pytest.mark.parametrize("confidence", [0.99, 0.9])
def test_the_band_is_the_binomial_summed(level, draws, confidence):
    law = [math.comb(draws, k) * level**k * (1 - level) ** (draws - k) for k in range(draws + 1)]
    tail = (1 - confidence) / 2
    low, high = (round(end * draws) for end in stats.rejection_band(level, draws, confidence))
    assert sum(law[:low]) < tail <= sum(law[: low + 1])
    assert sum(law[high + 1 :]) <= tail < sum(law[high:])
    assert sum(law[low : high + 1]) >= confidence


def test_bands_of_certainties():
    assert stats.rejection_band(0, 100) == (0, 0) and stats.rejection_band(1, 100) == (1, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: stats.attainable_level(0, 5),
        lambda: stats.attainable_level(3, 0),
        lambda: stats.attainable_level(3, [5, 5]),
        lambda: stats.attainable_level(3, 2.5),
        lambda: stats.attainable_level(3, 5, alpha=1.0),
        lambda: stats.attainable_level(3, 5, draws=0),
        lambda: stats.rejection_band(1.1, 10),
        lambda: stats.rejection_band(math.nan, 10),
        lambda: stats.rejection_band(0.05, 0),
        lambda: stats.rejection_band(0.05, 10, 1.0),
    ],
)
def test_what_is_refused(call):
    with pytest.raises(StatisticsError, match=r"allowed"):
        call()

"""AUROC: laws, scikit-learn, and the exclusion of single-class items."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paired_designs import RNG

from kvprobe import stats
from kvprobe.errors import StatisticsError

SCORES = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=9)  # few values, so ties are common
QUICK = settings(max_examples=40, deadline=None)


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

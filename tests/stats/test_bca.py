"""BCa of many columns is BCa of each, in one chunk or in many."""

import numpy as np
import pytest
from paired_designs import RNG

from kvprobe import stats
from kvprobe.stats import checks


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
    monkeypatch.setattr(checks, "TABLE", 2 * 199)
    for a, b in zip(whole, stats.bca_many(x, resamples=199), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)

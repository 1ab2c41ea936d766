"""Holm and Benjamini-Hochberg are those of statsmodels; a test that cannot reject says so."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe import stats

QUICK = settings(max_examples=40, deadline=None)


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

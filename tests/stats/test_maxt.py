"""Max-|T| over heads: enumeration, the primary test as its case of one head, and its family-wise size."""

import numpy as np
import pytest
from paired_designs import brute, lower_band, make_items, upper_band

from kvprobe import stats
from kvprobe.stats import checks


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
    monkeypatch.setattr(checks, "TABLE", 100)
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


def test_max_t_controls_the_family():
    """20 correlated heads under the null: P(any adjusted p <= 0.05) stays within the band, and is not lax."""
    trials, hits = 300, 0
    for s in range(trials):
        scores, masks = make_items(s, (4,) * 5, heads=20)
        scores = [w + 0.8 * w[:, :1] for w in scores]
        hits += stats.max_t_within_item(scores, masks, "mean_difference").p.min() <= 0.05
    assert lower_band(0.05, trials) <= hits / trials <= upper_band(0.05, trials)

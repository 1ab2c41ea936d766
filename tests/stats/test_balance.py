"""Balance: the formula by hand, other libraries' variances, laws, degenerate spreads, and coverage."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe import stats
from kvprobe.errors import StatisticsError
from kvprobe.records import to_json

QUICK = settings(max_examples=40, deadline=None)
FEW = {"resamples": 99}


def world(seed, n=7, low=2, high=7, shift=1.0):
    """Targets, their controls, and the controls chosen near them."""
    rng = np.random.default_rng(seed)
    target = rng.normal(shift, 1, n)
    controls = [rng.normal(0, 1, rng.integers(low, high)) for _ in range(n)]
    return target, controls, [own + rng.normal(0, 0.1, 3) for own in target]


def by_hand(target, controls, after=None):
    """SMD one number at a time; numpy has no part in it."""
    kept = [i for i, group in enumerate(controls) if len(group)]
    n = len(kept)
    mean_t = sum(float(target[i]) for i in kept) / n
    var_t = sum((float(target[i]) - mean_t) ** 2 for i in kept) / (n - 1)
    weighted = [(1 / n / len(controls[i]), float(x)) for i in kept for x in controls[i]]
    mean_c = sum(w * x for w, x in weighted)
    var_c = sum(w * (x - mean_c) ** 2 for w, x in weighted) / (1 - sum(w * w for w, _ in weighted))
    sd = math.sqrt((var_t + var_c) / 2)
    chosen = controls if after is None else after
    used = [i for i, group in enumerate(chosen) if len(group)]
    gaps = [float(target[i]) - sum(map(float, chosen[i])) / len(chosen[i]) for i in used]
    return sum(gaps) / len(gaps) / sd, sd


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_formula_by_hand(seed):
    target, controls, after = world(seed)
    controls[1], after[3] = np.array([]), []
    found = stats.standardised_difference(target, controls, after, **FEW)
    (before, sd), (matched, _) = by_hand(target, controls), by_hand(target, controls, after)
    assert found.before.mean == pytest.approx(before, rel=1e-12)
    assert found.after.mean == pytest.approx(matched, rel=1e-12)
    assert found.sd == pytest.approx(sd, rel=1e-12)
    assert (found.n, found.n_excluded, found.n_after, found.n_after_excluded) == (6, 1, 6, 1)
    assert (found.before.n, found.after.n, found.flagged) == (6, 6, False)


def test_equal_numbers_of_controls_give_the_textbook_pooled_sd():
    from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

    target, controls, _ = world(0, low=4, high=5)
    everything = np.concatenate(controls)
    found = stats.standardised_difference(target, controls, **FEW)
    assert found.sd == pytest.approx(math.sqrt((np.var(target, ddof=1) + np.var(everything, ddof=1)) / 2))
    as_many = [[value] for value in everything[: target.size]]  # Cohen's d of two samples of one size
    d = stats.standardised_difference(target, as_many, **FEW).before.mean
    pair = CompareMeans(DescrStatsW(target), DescrStatsW(everything[: target.size]))
    assert d == pytest.approx((pair.d1.mean - pair.d2.mean) / pair.std_meandiff_pooledvar / math.sqrt(target.size / 2))


def test_an_item_weighs_the_same_however_many_controls_it_has():
    target, controls, _ = world(1)
    more = [np.tile(controls[0], 50), *controls[1:]]
    one, other = (stats.standardised_difference(target, each, **FEW) for each in (controls, more))
    assert other.before.mean * other.sd == pytest.approx(one.before.mean * one.sd, rel=1e-12)
    assert abs(other.sd / one.sd - 1) < 0.05  # a pooled variance would be item 0's


@QUICK
@given(st.integers(0, 999), st.floats(-1e3, 1e3), st.floats(0.01, 100))
def test_shift_and_scale_change_nothing(seed, shift, scale):
    target, controls, after = world(seed)
    plain = stats.standardised_difference(target, controls, after, **FEW)
    moved = stats.standardised_difference(
        *(target * scale + shift, [c * scale + shift for c in controls], [a * scale + shift for a in after]), **FEW
    )
    for one, other in ((plain.before, moved.before), (plain.after, moved.after)):
        assert [one.mean, one.low, one.high] == pytest.approx([other.mean, other.low, other.high], rel=1e-6, abs=1e-7)
    assert moved.sd == pytest.approx(plain.sd * scale, rel=1e-6)


@QUICK
@given(st.integers(0, 999))
def test_target_and_control_swapped_flip_the_sign(seed):
    target, controls, _ = world(seed, low=1, high=2)
    swapped = np.concatenate(controls), [[own] for own in target]
    one, other = stats.standardised_difference(target, controls, **FEW), stats.standardised_difference(*swapped, **FEW)
    assert one.before.mean == pytest.approx(-other.before.mean, rel=1e-9)
    assert [one.before.low, one.before.high] == pytest.approx([-other.before.high, -other.before.low], rel=1e-9)


@QUICK
@given(st.integers(0, 999), st.randoms())
def test_order_of_items_and_controls_changes_no_estimate(seed, random):
    target, controls, after = world(seed)
    order = random.sample(range(len(target)), len(target))
    one = stats.standardised_difference(target, controls, after, **FEW)
    other = stats.standardised_difference(
        *(target[order], [controls[i][::-1] for i in order], [after[i][::-1] for i in order]), **FEW
    )
    for a, b in ((one.before, other.before), (one.after, other.after)):
        assert [a.mean, a.low, a.high] == pytest.approx([b.mean, b.low, b.high], rel=1e-9)


def test_perfect_balance_is_zero_over_a_spread_that_is_not():
    target, controls, _ = world(2)
    found = stats.standardised_difference(target, controls, [[own] * 3 for own in target], **FEW)
    assert (found.after.mean, found.after.low, found.after.high, found.flagged) == (0, 0, 0, False)
    assert found.sd > 0.5 and found.before.mean != 0


def test_both_columns_have_the_sd_before_matching():
    target, controls, _ = world(3)
    near = [[own - 0.1] for own in target]
    found = stats.standardised_difference(target, controls, near, **FEW)
    assert found.after.mean == pytest.approx(0.1 / found.sd, rel=1e-12)


def test_logs_are_the_difference_of_logarithms():
    target, controls, after = world(4)
    plain = stats.standardised_difference(target, controls, after, seed=5, **FEW)
    powers = np.exp(target), [np.exp(c) for c in controls], [np.exp(a) for a in after]
    logs = stats.standardised_difference(*powers, log=True, seed=5, **FEW)
    for name in ("before", "after"):
        assert getattr(logs, name).mean == pytest.approx(getattr(plain, name).mean, rel=1e-9)
        assert getattr(logs, name).beside.low == pytest.approx(getattr(plain, name).beside.low, rel=1e-9)
    assert logs.log and "logarithms" in logs.method and not plain.log


@pytest.mark.parametrize("value", [0.1, 3.0, 1e8])
def test_no_spread_and_no_difference_is_zero_and_flagged(value):
    found = stats.standardised_difference([value] * 3, [[value, value + value * 1e-15]] * 3, [[value]] * 3, **FEW)
    assert (found.before.mean, found.after.mean, found.flagged) == (0, 0, True)
    assert found.before.degenerate and math.isnan(found.before.low) and math.isnan(found.after.high)


@pytest.mark.parametrize("sign", [1, -1])
def test_no_spread_and_a_difference_is_infinite_and_flagged(sign):
    found = stats.standardised_difference([2.0 + sign] * 4, [[2.0, 2.0]] * 4, [[2.0 + sign]] * 4, **FEW)
    assert (found.before.mean, found.after.mean, found.flagged) == (sign * math.inf, 0, True)
    assert '"mean": null' in to_json(found.to_dict())  # infinite is no JSON


def test_fewer_than_two_items_are_undefined():
    for target, controls, n in (([1.0], [[2.0, 3.0]], 1), ([], [], 0), ([1.0, 2.0], [[], []], 0)):
        found = stats.standardised_difference(target, controls, controls, **FEW)
        assert (found.n, found.flagged, found.before.method) == (n, True, "undefined: n < 2")
        assert math.isnan(found.before.mean) and math.isnan(found.before.low) and math.isnan(found.sd)
    one = stats.standardised_difference([1.0, 2.0, 4.0], [[0.0], [1.0], [1.0]], [[], [2.5], []], **FEW)
    assert (one.n_after, one.after.n, one.after.degenerate) == (1, 1, True)
    assert one.after.mean == pytest.approx(-0.5 / one.sd) and math.isnan(one.after.low)


def test_nothing_matched_leaves_the_column_before():
    target, controls, _ = world(5)
    found = stats.standardised_difference(target, controls, [[]] * 7, **FEW)
    alone = stats.standardised_difference(target, controls, **FEW)
    assert found.before == alone.before and alone.after is None and alone.n_after_excluded == 0
    assert math.isnan(found.after.mean) and (found.n_after, found.n_after_excluded) == (0, 7)


def test_it_is_seeded_and_the_seed_moves_the_bootstrap_only():
    target, controls, after = world(6)
    a, b, c = (stats.standardised_difference(target, controls, after, seed=s, **FEW) for s in (1, 1, 2))
    assert a == b and a.before.beside.low != c.before.beside.low
    assert (a.before.low, a.before.method, a.before.beside.method) == (c.before.low, "t, jackknife", "BCa")
    assert (a.seed, a.resamples, a.before.beside.resamples) == (1, 99, 99)


def test_the_interval_is_the_jackknife_item_by_item():
    from scipy.stats import t

    target, controls, _ = world(7)
    left_out = [by_hand(np.delete(target, i), controls[:i] + controls[i + 1 :])[0] for i in range(7)]
    centre = sum(left_out) / 7
    half = t.ppf(0.95, 6) * math.sqrt(6 / 7 * sum((value - centre) ** 2 for value in left_out))
    found = stats.standardised_difference(target, controls, level=0.9, **FEW).before
    assert [found.low, found.high] == pytest.approx([found.mean - half, found.mean + half], rel=1e-9)


def test_the_bootstrap_is_scipys_over_the_formula_by_hand():
    from scipy.stats import bootstrap

    target, controls, _ = world(8, n=12)

    def smd(picks):
        return by_hand(target[picks], [controls[i] for i in picks])[0]

    scipys = bootstrap((np.arange(12),), smd, vectorized=False, n_resamples=999, method="BCa", rng=3)
    found = stats.standardised_difference(target, controls, seed=3, resamples=999).before.beside
    limits = [scipys.confidence_interval.low, scipys.confidence_interval.high]
    assert [found.low, found.high] == pytest.approx(limits, abs=0.02)  # its quantiles are interpolated


@pytest.mark.parametrize(("n", "shift"), [(8, 1.0), (12, 4.0), (30, 1.0)])
def test_the_interval_covers_the_true_smd(n, shift):
    trials, hits = 300, 0
    for seed in range(trials):
        target, controls, _ = world(seed, n, 3, 9, shift)
        found = stats.standardised_difference(target, controls, resamples=2).before
        hits += found.low <= shift <= found.high  # targets and controls have SD 1
    assert 0.95 - 3.3 * math.sqrt(0.95 * 0.05 / trials) <= hits / trials < 0.995


def test_the_largest_ratio_names_its_item():
    found = stats.max_abs_ln_ratio([1.0, 2.0, 8.0], [[1.1, 0.8], [], [8.0, 10.0, 8.1]])
    assert found.value == pytest.approx(abs(math.log(10 / 8))) and found.item == 2
    assert (found.n, found.n_excluded, found.n_placebos) == (2, 1, 5)
    below = stats.max_abs_ln_ratio([1.0, 2.0], [[0.5], [2.1]])
    assert (below.value, below.item) == (pytest.approx(math.log(2)), 0)
    scaled = stats.max_abs_ln_ratio([7.0, 14.0], [[3.5], [14.7]])
    assert scaled.value == pytest.approx(below.value)
    assert stats.max_abs_ln_ratio([3.0], [[3.0]]).value == 0
    none = stats.max_abs_ln_ratio([1.0], [[]])
    assert math.isnan(none.value) and (none.item, none.n, none.n_excluded) == (None, 0, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target": [1.0, math.nan]}, "target: 1 of 2 values are NaN"),
        ({"controls": [[1.0], [math.nan]]}, "controls of item 1: 1 of 1"),
        ({"controls": [[1.0]]}, "controls has 1 items, target 2"),
        ({"after": [[1.0], [math.inf]]}, "after of item 1"),
        ({"after": [[1.0]]}, "after has 1 items, target 2"),
        ({"controls": [[1.0], [[2.0]]]}, "controls of item 1 must have 1 axis"),
        ({"log": True, "target": [0.0, 1.0]}, "target has the value 0: its logarithm needs values > 0"),
        ({"log": True, "after": [[1.0], [-2.0]]}, "after of item 1 has the value -2"),
        ({"level": 1.0}, "level=1.0"),
        ({"seed": -1}, "seed=-1"),
        ({"resamples": 0}, "resamples=0"),
    ],
)
def test_what_is_refused(change, words):
    given = {"target": [1.0, 2.0], "controls": [[1.0], [2.0, 3.0]]} | change
    with pytest.raises(StatisticsError, match=words.replace("(", r"\(")):
        stats.standardised_difference(**given)


@pytest.mark.parametrize("placebos", [[[1.0], [0.0]], [[1.0], [math.nan]], [[1.0]]])
def test_ratios_of_nothing_are_refused(placebos):
    with pytest.raises(StatisticsError):
        stats.max_abs_ln_ratio([1.0, 2.0], placebos)


def test_resamples_equal_to_the_estimate_are_half_below_it():
    """Two values only: a third of the resamples tie with the estimate, and z0 is about 0, not far below."""
    target, controls = np.tile([0.0, 1.0], 6), [[0.0, 0.5]] * 12
    found = stats.standardised_difference(target, controls, seed=2, resamples=4999).before
    mirrored = stats.standardised_difference(-target, [[0.0, -0.5]] * 12, seed=2, resamples=4999).before
    assert [found.beside.low, found.beside.high] == pytest.approx(
        [-mirrored.beside.high, -mirrored.beside.low], abs=0.02
    )

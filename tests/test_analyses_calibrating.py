"""Calibration by itself: placebos of pseudo-targets, and how often a test rejects made-up effects."""

import sys
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from fake_trace import fake_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from test_analyses import ROOT

from kvprobe import placebo, stats
from kvprobe.placebo.pools import disjoint, dissimilar

pytestmark = pytest.mark.slow  # questions above the library: what they stand on has fast tests of its own


def helper(name):
    """A script as a module that others can import, too."""
    if str(ROOT / "analyses") not in sys.path:
        sys.path.append(str(ROOT / "analyses"))
    return import_module(name)


# ---- placebos of a pseudo-target


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=12), st.integers(1, 3), st.floats(0.05, 2))
@settings(max_examples=60, deadline=None)
def test_placebos_are_the_nearest_in_strength_within_the_caliper(strengths, k, caliper):
    """Of spans that never meet: a loop over sorted distances says the same."""
    sets = [((10 * i, 10 * i + 5),) for i in range(len(strengths))]
    found = helper("calibrating").groups(sets, np.array(strengths), disjoint, k, caliper)
    wanted = []
    for t, own in enumerate(strengths):
        far = {j: abs(np.log(x) - np.log(own)) for j, x in enumerate(strengths) if j != t}
        near = sorted((j for j in far if far[j] <= caliper), key=lambda j: (far[j], j))
        wanted += [[t, *near[:k]]] if len(near) >= k else []
    assert found == wanted


@pytest.mark.parametrize("match_on", ["bound", "perturbation"])
def test_placebos_are_those_that_the_library_finds(match_on):
    """Every window of a trace as a candidate, and each of some as the target of ``match``."""
    trace = fake_trace(60, queries=(57, 58, 59), seed=3)
    sets = [((start, start + 3),) for start in range(4, 55)]
    strengths = placebo.set_strengths(trace, sets, measures=(match_on,))[match_on].to_numpy()
    mine = {group[0]: group[1:] for group in helper("calibrating").groups(sets, strengths, disjoint, 3, 0.4)}
    agreed = 0
    for t in range(0, len(sets), 5):
        theirs = placebo.match(trace, sets[t], 3, match_on, caliper=0.4, remedies=["contiguous"])
        assert [sets[j] for j in mine.get(t, [])] == [*theirs.placebos]
        agreed += theirs.matched
    assert agreed >= 5


def test_unions_share_no_needle_with_their_pseudo_target():
    needles = [((10 * i, 10 * i + 5),) for i in range(6)]
    sets = [*needles, *(a + b for i, a in enumerate(needles) for b in needles[i + 1 :])]
    strengths = np.ones(len(sets))
    alone = helper("calibrating").groups(sets, strengths, dissimilar, 4, 0.25, range(6))
    assert [group[0] for group in alone] == [*range(6)]
    for t, *others in alone:
        assert min(others) >= 6 and all(needles[t][0] not in sets[j] for j in others)
    both = helper("calibrating").groups(sets[6:], strengths[6:], dissimilar, 4, 0.25)
    assert all(not {*sets[6 + t]} & {*sets[6 + j]} for t, *others in both for j in others)
    sharing = helper("calibrating").groups(sets[6:], strengths[6:], dissimilar, 4, 0.25, None, True)
    shared = [len({*sets[6 + t]} & {*sets[6 + j]}) for t, *others in sharing for j in others]
    assert {*shared} == {0, 1}  # a third of the tokens of two pairs, never the pair itself


def test_every_window_of_a_block_is_pseudo_target_once_and_direction_for_the_others():
    windows = [((4 * i, 4 * i + 6),) for i in range(30)]
    asked = SimpleNamespace(placebos=3, blocks=2)
    found = helper("pseudo_targets").blocks(windows, asked, np.random.default_rng(0))
    assert len(found) == 8
    for block in (found[:4], found[4:]):
        members = sorted(block[0])
        assert [group[0] for group in block] != members[:1] * 4 and sorted(group[0] for group in block) == members
        assert all(sorted(group) == members for group in block)
        assert all(b - a >= 2 for a, b in pairwise(members))  # neighbours overlap
    assert helper("pseudo_targets").blocks(windows[:3], asked, np.random.default_rng(0)) == []


def test_the_tested_placebos_of_a_union_share_no_needle():
    needles = [((10 * i, 10 * i + 5),) for i in range(6)]
    sets = [a + b for i, a in enumerate(needles) for b in needles[i + 1 :]]
    whole, kept = (
        helper("calibrating").groups(sets, np.ones(15), dissimilar, 4, 0.25, tested=t) for t in (False, True)
    )
    assert [len(group) for group in whole] == [5] * 15 and [len(group) for group in kept] == [3] * 15
    for group, few in zip(whole, kept, strict=True):
        assert {*few} < {*group} and few[0] == group[0]
        assert len({span for i in few for span in sets[i]}) == 6  # three disjoint pairs of six needles


# ---- draws


def exchangeable(items=6, targets=40, k=4, seed=0, skew=1.0):
    """Groups whose five numbers come from one skewed law: any of them might have been the target."""
    return [np.exp(skew * np.random.default_rng([seed, i]).normal(size=(targets, 1 + k))) for i in range(items)]


@pytest.mark.parametrize("skew", [0.1, 2.0])
def test_exchangeable_pseudo_targets_are_rejected_at_the_level(skew):
    found = helper("calibrating").calibrate(exchangeable(targets=400, skew=skew), 1500, seed=1)
    assert found["inside"] and found["low"] < found["level"] < found["high"] and found["draws"] == 1500
    # 5^6 assignments, so that floor(0.05 · 5^6) of them are below 0.05, and p is exact.
    assert found["level"] == 781 / 5**6
    low, high = stats.rejection_band(found["level"], 1500)
    assert (found["low"], found["high"]) == (low, high) and low <= found["rate"] <= high
    assert found["farthest"] == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(("shift", "hurts"), [(-4.0, 1.0), (4.0, 0.0)])
def test_a_pseudo_target_that_is_not_exchangeable_is_found_out(shift, hurts):
    planted = [each + np.array([shift, 0, 0, 0, 0]) for each in exchangeable()]
    found = helper("calibrating").calibrate(planted, 100, seed=1)
    assert not found["inside"] and found["rate"] > found["high"] and found["hurts"] == hurts
    assert np.sign(found["difference"]) == np.sign(shift) and found["farthest"] > 0.5


def test_a_pseudo_target_in_the_middle_of_its_placebos_is_found_out():
    """Never extreme, so never rejected: that is no calibration either."""
    middle = [np.array([[0.0, -1, 1, -2, 2]] * 9) for _ in range(6)]
    found = helper("calibrating").calibrate(middle, 300)
    assert found["rate"] == 0 and not found["inside"] and found["farthest"] == 0


def test_draws_that_are_all_zero_are_counted_and_left_out():
    halves = [np.array([[0.0, 0, 0], [1, 2, 3]])] * 3
    found = helper("calibrating").calibrate(halves, 400, seed=2)
    assert found["draws"] + found["all_zero"] == 400 and 30 <= found["all_zero"] <= 75  # one of 8
    nothing = helper("calibrating").calibrate([np.zeros((4, 3))] * 2, 10)
    assert nothing["draws"] == 0 and nothing["all_zero"] == 10 and np.isnan(nothing["rate"]) and not nothing["inside"]


def test_items_without_placebos_are_no_part_of_a_draw():
    calibrate = helper("calibrating").calibrate
    live = exchangeable(items=4)
    assert calibrate([*live, np.zeros((0, 5))], 50)["n_items"] == 4
    assert calibrate([], 50) | {"n_items": 0, "draws": 0} == pytest.approx(calibrate([], 50), nan_ok=True)


def test_items_may_have_placebos_of_different_number():
    """Levels are those of each draw, mean over draws; exchangeable groups stay inside the band."""
    ragged = [[row[: 2 + i % 4] for i, row in enumerate(each)] for each in exchangeable(targets=400)]
    found = helper("calibrating").calibrate(ragged, 1500, seed=3)
    assert found["inside"] and found["placebos"] == 2.5
    expected = np.mean([1 / (2 + i % 4) for i in range(400)])
    assert found["farthest_expected"] == pytest.approx(expected) == pytest.approx(found["farthest"], abs=0.03)
    pairs = helper("calibrating").calibrate([[row[:2] for row in each] for each in exchangeable()], 300)
    assert pairs["level"] == 1 / 32  # 64 signs, in pairs of one |T|: 1/32 is the largest below 0.05


def test_a_rate_is_the_share_of_the_draws_that_reject():
    """Two items with one group each: every draw is the same, and so is its p."""
    one = [np.array([[9.0, 1, 2, 3, 4, 5, 6]]), np.array([[8.0, 1, 2, 3, 4, 5, 6]])]
    scores, labels = [each[0] for each in one], [np.arange(7) == 0] * 2
    p = stats.permutation_within_item(scores, labels).p
    found = helper("calibrating").calibrate(one, 7)
    assert found["rate"] == float(p < 0.05) == 1.0 and found["datasets"] == 0 and found["level"] == 2 / 49
    assert found["signflip"] == found["wilcoxon"] == 0  # two items: neither can be below 0.5
    # 20 assignments: the smallest p is 0.05 itself, which is not below it.
    uneven = [np.array([[9.0, 1, 2, 3]]), np.array([[8.0, 1, 2, 3, 4]])]
    assert helper("calibrating").calibrate(uneven, 5)["level"] == 0

"""Pools: where placebos may lie, unions of hard spans, disjoint and dissimilar choices, token sets."""

from itertools import combinations, pairwise
from math import comb

import numpy as np
import pytest
from fake_trace import fake_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.errors import InterventionError, PromptError
from kvprobe.placebo import length_only
from kvprobe.placebo.keysets import centre, jaccard, key_set, overlap, positions, size, span_list, text, union
from kvprobe.placebo.pools import apart, disjoint, dissimilar, hard_spans, room, unions
from kvprobe.placebo.scope import Scope
from kvprobe.placebo.tokens import Units, sentence_starts, single_tokens

TARGET = ((20, 26),)


def spans(draw_from=40):
    pair = st.tuples(st.integers(0, draw_from - 1), st.integers(1, 6))
    return st.lists(pair.map(lambda at: (at[0], min(draw_from, at[0] + at[1]))), max_size=8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(spans(), spans(), st.integers(1, 7), st.integers(0, 6), st.integers(10, 40))
def test_windows_are_all_those_of_free_keys(protect, hard, length, first, stop):
    taken = {at for a, b in [*TARGET, *protect, *hard] for at in range(a, b)}
    found = room(TARGET, protect, hard, first, stop).windows(length)
    expected = [((s, s + length),) for s in range(first, stop - length + 1) if not taken & set(range(s, s + length))]
    assert found == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(spans(30), st.integers(1, 5), st.randoms(use_true_random=False))
def test_disjoint_windows_are_found_where_they_exist_and_the_nearest_comes_first(given_spans, k, random):
    sets = [(span,) for span in dict.fromkeys(given_spans)]
    random.shuffle(sets)
    found = disjoint(sets, k)
    most = max(
        (n for n in range(len(sets) + 1) if any(_apart(some) for some in combinations(sets, n))),
        default=0,
    )
    assert _apart(found) and len(found) == min(k, most)
    assert found == sorted(found, key=sets.index)
    if most >= k == 1:
        assert found == sets[:1]


def _apart(sets):
    return not any(overlap(a, b) for a, b in combinations(sets, 2))


def test_disjoint_passes_over_a_nearest_window_that_would_leave_no_room():
    middle, left, right = ((4, 8),), ((1, 5),), ((7, 11),)
    assert disjoint([middle, left, right], 2) == [left, right]
    assert disjoint([middle, left, right], 1) == [middle]
    assert disjoint([middle, left, right], 3) == [left, right]


def test_interleaved_sets_are_disjoint_only_if_they_share_no_key_at_all():
    one, other, third = ((0, 2), (20, 22)), ((4, 6), (8, 10)), ((1, 2), (12, 14))
    assert disjoint([third, other, one], 2) == [third, other]
    assert _apart(disjoint([one, other, third], 3))


def test_dissimilar_prefers_unlike_unions_and_fills_up_with_the_nearest():
    a, b, c, d = (0, 5), (10, 15), (20, 25), (30, 35)
    ordered = [(a, b, c), (a, b, d), (c, d), (b, c, d)]
    assert dissimilar(ordered, 2) == [(a, b, c), (a, b, d)]  # Jaccard 2 / 4
    assert dissimilar([(a, b), (a, b, c), (c, d)], 2) == [(a, b), (c, d)]
    assert dissimilar([(a, b), (a, b, c), (c, d)], 3) == [(a, b), (c, d), (a, b, c)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(spans(), spans())
def test_key_set_arithmetic_equals_that_of_sets_of_positions(one, other):
    a, b = ({at for lo, hi in some for at in range(lo, hi)} for some in (one, other))
    A, B = union(a), union(b)
    assert set(positions(A)) == a and size(A) == len(a) and overlap(A, B) == bool(a & b)
    if a and b:
        assert jaccard(A, B) == pytest.approx(len(a & b) / len(a | b))
        assert centre(A) == pytest.approx(np.mean(sorted(a)))
    assert all(left[1] < right[0] for left, right in pairwise(A))


def test_key_sets_are_sorted_named_and_shown():
    assert key_set([(9, 12), (3, 5)], 20) == ((3, 5), (9, 12))
    assert key_set((3, 5), 20) == ((3, 5),)
    assert key_set(["context", (9, 12)], 20, spans={"context": (1, 4)}) == ((1, 4), (9, 12))
    assert text(((3, 5), (9, 12))) == "3:5 9:12"
    assert span_list(None, 20, "hard") == [] == span_list([], 20, "hard")
    assert span_list([(9, 12), (3, 5), (9, 12)], 20, "hard") == [(3, 5), (9, 12)]


@pytest.mark.parametrize(
    ("given_keys", "message"),
    [
        ([], "no spans given"),
        ([(3, 6), (5, 9)], "overlap at 5; allowed: disjoint"),
        ("needle", r"target: the trace has no span 'needle'; it has context"),
        (7, r"target is 7; allowed"),
        ([(3, 30)], r"span \(3, 30\) with n = 20"),
    ],
)
def test_wrong_key_sets_are_one_line(given_keys, message):
    with pytest.raises(PromptError, match=message):
        key_set(given_keys, 20, spans={"context": (0, 9)})


def test_unions_are_all_of_two_to_five_spans_or_a_drawn_share():
    hard = [((s, s + 3),) for s in range(0, 80, 10)]
    found = unions(hard, seed=0)
    assert len(found) == len(set(found)) == sum(comb(8, k) for k in (2, 3, 4, 5))
    assert {len(keys) for keys in found} == {2, 3, 4, 5} and unions(hard, seed=5) == found
    many = [((s, s + 3),) for s in range(0, 300, 10)]
    drawn = unions(many, seed=1)
    assert len(drawn) == len(set(drawn)) == 1024 and {len(keys) for keys in drawn} == {2, 3, 4, 5}
    assert drawn == unions(many, seed=1) != unions(many, seed=2)
    assert unions(hard[:1], 0) == [] and unions([((0, 5),), ((3, 8),)], 0) == []


def test_hard_spans_that_meet_target_or_protected_keys_are_no_controls():
    assert hard_spans([(30, 34), (1, 5), (22, 28), (30, 34)], TARGET, [(33, 36)]) == [((1, 5),)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), spans(60), st.integers(1, 4))
def test_length_only_windows_are_disjoint_of_the_targets_length_and_seeded(seed, hard, k):
    found = length_only(100, TARGET, k, protect=[(90, 95)], hard=hard, seed=seed, first=4, stop=98)
    barred = (*TARGET, (90, 95), *hard)
    assert len(found) == k and _apart(found)
    for keys in found:
        assert size(keys) == 6 and len(keys) == 1 and not overlap(keys, barred) and 4 <= keys[0][0] < keys[0][1] <= 98
    assert found == length_only(100, TARGET, k, protect=[(90, 95)], hard=hard, seed=seed, first=4, stop=98)
    assert len({length_only(100, TARGET, 1, seed=s) for s in range(6)}) > 1


def test_length_only_says_how_many_fit():
    with pytest.raises(PromptError, match=r"no room for 9 disjoint windows of 6 tokens .* allowed: at most 5"):
        length_only(40, (20, 26), 9, first=0)
    with pytest.raises(InterventionError, match="k=0; allowed: a whole number, at least 1"):
        length_only(40, (20, 26), 0)


def test_token_units_are_sorted_and_dealt_into_equal_disjoint_sets():
    strengths = np.array([8.0, 7.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    units = Units([(at, at + 1) for at in (50, 10, 30, 20, 40, 60, 70)], strengths, count=3, spare=0)
    assert units.strongest() == ((10, 11), (30, 31), (50, 51))
    one, other = units.dealt(0, 2)
    assert not overlap(one, other) and size(one) == size(other) == 3
    held = dict(zip((50, 10, 30, 20, 40, 60, 70), strengths, strict=True))
    sums = [sum(held[at] for at in positions(keys)) for keys in (one, other)]
    assert sorted(sums) == [14.0, 15.0] and units.sums(2).tolist() == [14.5, 11.0]
    assert {at for keys in units.dealt(1, 2) for at in positions(keys)} == {10, 30, 20, 40, 60, 70}


def test_tokens_and_sentence_starts_lie_in_free_room():
    trace = fake_trace(80, queries=(70, 79))
    place = room(((20, 27),), [(60, 64)], [(40, 44)], 4, 70)
    tokens = single_tokens(Scope(trace), place, "bound")
    assert sorted(at for at, _ in tokens.spans) == [s[0][0] for s in place.windows(1)]
    assert np.all(np.diff(tokens.strengths) <= 0) and (tokens.count, tokens.spare) == (7, 0)
    sentences = [(0, 9), (9, 19), (19, 24), (30, 39), (39, 50), (50, 51), (52, 58), (57, 60), (64, 69)]
    units = sentence_starts(Scope(trace), place, sentences, "bound")
    assert sorted(units.spans) == [(9, 11), (30, 32), (52, 54), (57, 59), (64, 66)]
    assert (units.count, units.spare) == (4, 1) and size(units.strongest()) == 7
    assert sentence_starts(Scope(trace), place, sentences[:4], "bound") is None


@given(st.lists(st.sets(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=7))
def test_the_sets_that_stand_apart_are_the_largest_disjoint_family_the_first_in_order(groups):
    sets = [tuple((10 * i, 10 * i + 5) for i in sorted(group)) for group in groups]

    def free(family):
        return not any(groups[i] & groups[j] for i, j in combinations(family, 2))

    families = [f for size in range(len(sets) + 1) for f in combinations(range(len(sets)), size) if free(f)]
    largest = max(map(len, families))
    assert apart(sets) == tuple(i in min(f for f in families if len(f) == largest) for i in range(len(sets)))


def test_unions_that_share_no_needle_come_first_and_from_as_near_as_possible():
    """Nearest first, six needles: pairs 0-1, 0-2 meet; 0-1, 2-3, 4-5 are a family of three, 1-2 is never needed."""
    pairs = [(0, 1), (0, 2), (1, 2), (2, 3), (4, 5), (0, 3)]
    sets = [((10 * i, 10 * i + 5), (10 * j, 10 * j + 5)) for i, j in pairs]
    chosen = dissimilar(sets, 4)
    assert chosen[:3] == [sets[0], sets[3], sets[4]] and apart(chosen) == (True, True, True, False)
    assert len(chosen) == 4 and chosen[3] == sets[1]
    # Far down the list stands a family as large as one near the top: the near one is taken.
    assert dissimilar([*sets[:1], sets[3], *sets], 2) == [sets[0], sets[3]]

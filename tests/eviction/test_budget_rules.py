"""Budgets: each method against its rule, worked out with sorted lists and fractions."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from budget_requests import best, counts, present, request, requests, tables
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvprobe.errors import EvictionError
from kvprobe.eviction.budgets import AdaKV, Duo, HeadKV, HeadProfile, LayerGlobal, Pyramid

SETTINGS = settings(max_examples=150, deadline=None)
FEW = settings(max_examples=80, deadline=None)


def sure_marks(row, reserved, at_least):
    """The reserved, and the best of a row until there are ``at_least``."""
    order = sorted(range(len(row)), key=lambda t: (not reserved[t], -row[t], t))
    there = [t for t in order if row[t] > -math.inf]
    marks = set(there[: max(at_least, sum(reserved))])
    return [t in marks for t in range(len(row))]


@SETTINGS
@given(requests(most_pads=5), st.sampled_from([0, 0.1, 0.2, 0.29, 0.5, 0.7, 1]))
def test_adakv_is_the_top_k_of_the_layer_above_everyones_safeguard(asked, safeguard):
    scores, reserved = tables(asked)
    at_least = asked.base * round(safeguard * 100) // 100
    marks = [
        [sure_marks(row, flags, at_least) for row, flags in zip(layer, marked, strict=True)]
        for layer, marked in zip(scores, reserved, strict=True)
    ]
    total = asked.base * asked.n_sets
    assume(all(sum(layer) <= total for layer in counts(marks)))
    expected = [best([layer], [marked], total)[0] for layer, marked in zip(scores, marks, strict=True)]
    got = AdaKV(safeguard).allocate(asked)
    assert got.budgets.tolist() == expected
    assert got.at_least == at_least and got.notes == {}


@SETTINGS
@given(requests(most_pads=5))
def test_adakv_mix_is_a_fifth_uniform_and_the_rest_by_the_top_k(asked):
    scores, reserved = tables(asked)
    off = 0
    got = AdaKV("mix").allocate(asked)
    for layer, marked, budgets in zip(scores, reserved, got.budgets.tolist(), strict=True):
        everything = best([layer], [marked], asked.base * asked.n_sets)[0]
        for row, flags, all_of_it, budget in zip(layer, marked, everything, budgets, strict=True):
            w = sum(flags)
            mixed = w + round(Fraction(1, 5) * (asked.base - w) + Fraction(4, 5) * (all_of_it - w))
            assert budget == min(max(mixed, w), present(row))
            off += budget - asked.base
    assert got.notes == {"total_off": off} and got.at_least == asked.base // 5


def test_adakv_mix_misses_the_total_by_what_rounding_leaves():
    # b′ = 4: 0.8 + 0.8 · (8, 4, 0) = 7.2, 4, 0.8 becomes 7, 4, 1; with (6, 5, 1) it is 5.6, 4.8, 1.6: 6, 5, 2.
    falling = [[1.0] * 8, [1.0] * 4 + [0.0] * 4, [0.0] * 8]
    for held, expected, off in [((8, 4, 0), [7, 4, 1], 0), ((6, 5, 1), [6, 5, 2], 1)]:
        rows = [[1.0] * k + [0.0] * (8 - k) for k in held]
        got = AdaKV("mix").allocate(request([rows], [[[False] * 8] * 3], 4))
        assert got.budgets.tolist() == [expected] and got.notes["total_off"] == off
    assert AdaKV(0).allocate(request([falling], [[[False] * 8] * 3], 4)).budgets.tolist() == [[8, 4, 0]]


def test_floors_are_exact():
    # 0.29 · 100 is 28.999999999999996 as a float.
    asked = request([[[1.0] * 200, [0.0] * 200]], [[[False] * 200] * 2], 100)
    got = AdaKV(0.29).allocate(asked)
    assert got.at_least == 29 and got.budgets.tolist() == [[171, 29]]


@pytest.mark.parametrize("scope", ["layer", "model"])
@SETTINGS
@given(asked=requests(most_pads=5))
def test_layer_global_is_one_sorted_list(scope, asked):
    scores, reserved = tables(asked)
    if scope == "model":
        expected = best(scores, reserved, asked.base * asked.n_sets * asked.n_layers)
    else:
        pairs = zip(scores, reserved, strict=True)
        expected = [best([layer], [marked], asked.base * asked.n_sets)[0] for layer, marked in pairs]
    got = LayerGlobal(scope).allocate(asked)
    assert got.budgets.tolist() == expected and got.at_least == 0


def test_a_reserved_entry_comes_before_any_score():
    asked = request([[[9.0, 8.0, -3.0], [math.inf, 7.0, -2.0]]], [[[False, False, True]] * 2], 1)
    assert LayerGlobal().allocate(asked).budgets.tolist() == AdaKV().allocate(asked).budgets.tolist() == [[1, 1]]


def ramp(b, n, w, n_layers, beta):
    """PyramidKV's layers as real numbers, or None where it falls back to uniform."""
    most = 2 * b - Fraction(b) / Fraction(str(beta))
    least = 2 * b - most
    if most > n - w:
        most, least = Fraction(n - w), Fraction(2 * b - n + w)
    if not n >= most >= least >= w:
        return None
    return [most - (most - least) * Fraction(i, max(n_layers - 1, 1)) for i in range(n_layers)]


@SETTINGS
@given(
    st.integers(1, 300), st.integers(0, 40), st.integers(1, 9), st.sampled_from([1, 1.5, 2, 3, 20]), st.integers(1, 300)
)
def test_pyramid_is_the_line_rounded_with_an_exact_total(n, w, n_layers, beta, b):
    assume(w <= b <= n)
    reserved = [[t >= n - w for t in range(n)]] * 2
    got = Pyramid(beta).allocate(request([[[0.0] * n] * 2] * n_layers, [reserved] * n_layers, b))
    line = ramp(b, n, w, n_layers, beta)
    assert got.notes == {"fallback": line is None} and got.at_least == 0
    layers = got.budgets[:, 0].tolist()
    assert got.budgets[:, 1].tolist() == layers and sum(layers) == b * n_layers
    if line is None or n_layers == 1:
        assert layers == [b] * n_layers
        return
    assert layers == sorted(layers, reverse=True) and w <= layers[-1] and layers[0] <= n
    up = [Fraction(x) - math.floor(x) for x in line]
    raised = [k - math.floor(x) for k, x in zip(layers, line, strict=True)]
    assert set(raised) <= {0, 1}
    assert not any(raised[i] < raised[j] and up[i] > up[j] for i in range(n_layers) for j in range(n_layers))
    assert not any(raised[i] < raised[j] and up[i] == up[j] and i < j for i in range(n_layers) for j in range(n_layers))


@pytest.mark.parametrize(
    ("b", "fallback", "first", "last"), [(639, True, 639, 639), (640, False, 1248, 32), (1000, False, 1950, 50)]
)
def test_pyramid_falls_back_below_640_entries_at_a_window_of_32(b, fallback, first, last):
    n = 4000
    reserved = [[[t >= n - 32 for t in range(n)]]] * 30
    got = Pyramid().allocate(request([[[0.0] * n]] * 30, reserved, b))
    assert got.notes == {"fallback": fallback}
    assert (int(got.budgets[0]), int(got.budgets[-1])) == (first, last)


def test_pyramid_is_clamped_by_what_the_context_holds():
    n, w, b = 1000, 50, 700
    reserved = [[[t >= n - w for t in range(n)]]] * 3
    got = Pyramid().allocate(request([[[0.0] * n]] * 3, reserved, b))
    assert got.budgets[:, 0].tolist() == [950, 700, 450]


def shares(start, weights, upper, total):
    """min(upper, start + λ · weight), λ by bisection; real numbers."""
    low, high = Fraction(0), Fraction(1)
    fill = lambda x: sum(min(u, start + x * s) for s, u in zip(weights, upper, strict=True))  # noqa: E731
    while fill(high) < total and high < 1 << 80:
        high *= 2
    for _ in range(160):
        middle = (low + high) / 2
        low, high = (middle, high) if fill(middle) < total else (low, middle)
    return [min(Fraction(u), start + high * s) for s, u in zip(weights, upper, strict=True)]


@FEW
@given(requests(most_pads=4, window=True), st.data(), st.integers(1, 3), st.sampled_from([1, 1.1, 1.5, 2, 3, 50]))
def test_headkv_shares_its_pool_by_importance_and_fills_up_to_what_is_there(asked, data, group, beta):
    asked = replace(asked, group=group)
    n_heads = asked.n_sets * group
    row = st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, 7.5]), min_size=n_heads, max_size=n_heads)
    importance = data.draw(st.lists(row, min_size=asked.n_layers, max_size=asked.n_layers))
    assume(any(map(any, importance)))
    got = HeadKV(torch.tensor(importance, dtype=torch.float64), beta).allocate(asked)
    scores, reserved = tables(asked)
    w = max(sum(flags) for layer in asked.reserved for flags in layer.tolist())
    rest = asked.base - w
    pool = math.floor(rest / Fraction(str(beta)))
    sums = [sum(map(Fraction, layer[i : i + group])) for layer in importance for i in range(0, n_heads, group)]
    upper = [present(each) for layer in scores for each in layer]
    start, total = rest - pool + w, asked.base * len(upper)
    expected = shares(start, [s / sum(sums) for s in sums], upper, total)
    budgets = got.budgets.flatten().tolist()
    if all(s > 0 for s in sums):
        less = Fraction(1, 10**9)  # bisection comes from above
        assert all(math.floor(x - less) <= k <= math.ceil(x) for k, x in zip(budgets, expected, strict=True))
    assert sum(budgets) == total
    for i, k in enumerate(budgets):
        assert counts(reserved)[i // asked.n_sets][i % asked.n_sets] <= k <= upper[i]
        assert k >= min(start, upper[i])
        for j, other in enumerate(budgets):  # the more important holds as much, unless it is full or rounding gave way
            assert sums[i] < sums[j] or k >= other - 1 or k == upper[i]


def test_headkv_by_hand():
    # b′ = 10 − 2 = 8, β 2: pool 4 a set, 24 in all; start 8 − 4 + 2 = 6. Shares of 24: 12, 6, 3, 3, 0, 0.
    asked = request([[[0.0] * 40] * 3] * 2, [[[t > 37 for t in range(40)]] * 3] * 2, 10)
    assert HeadKV(((4, 2, 1), (1, 0, 0)), beta=2).allocate(asked).budgets.tolist() == [[18, 12, 9], [9, 6, 6]]
    # A larger β leaves less to share: b′ // 4 = 2 a set, 12 in all, start 8.
    assert HeadKV(((4, 2, 1), (1, 0, 0)), beta=4).allocate(asked).budgets.tolist() == [[14, 11, 10], [9, 8, 8]]
    # 16 are there: the first head is full, and its 2 go to the others that have importance, 2 : 1 : 1.
    short = request([[[0.0] * 16] * 3] * 2, [[[t > 13 for t in range(16)]] * 3] * 2, 10)
    assert HeadKV(((4, 2, 1), (1, 0, 0)), beta=2).allocate(short).budgets.tolist() == [[16, 13, 10], [9, 6, 6]]
    # All importance in one head: what it cannot take goes to everyone in equal parts.
    assert HeadKV(((1, 0, 0), (0, 0, 0)), beta=2).allocate(short).budgets.tolist() == [[16, 9, 9], [9, 9, 8]]
    assert HeadKV(((0, 0, 0), (0, 0, 1)), beta=2).allocate(short).budgets.tolist() == [[9, 9, 9], [9, 8, 16]]


def test_headkv_sums_query_heads_of_a_group_and_reads_profiles():
    asked = request([[[0.0] * 40] * 2] * 1, [[[False] * 40] * 2], 10, group=2)
    direct = HeadKV(((3, 0, 0, 1),), beta=1).allocate(asked).budgets.tolist()
    assert direct == [[15, 5]]
    assert HeadKV(HeadProfile("m", "retrieval", ((3, 0, 0, 1),)), beta=1).allocate(asked).budgets.tolist() == direct


@SETTINGS
@given(st.data(), st.sampled_from([0, 0.1, 0.25, 0.29, 0.5, 1, None]))
def test_duo_streams_the_lowest_share_of_heads(data, ratio):
    asked = data.draw(requests(most_pads=5))
    value = st.sampled_from([0.0, 0.2, 0.2000001, 0.9, 1.0])
    row = st.lists(value, min_size=asked.n_sets, max_size=asked.n_sets)
    gates = data.draw(st.lists(row, min_size=asked.n_layers, max_size=asked.n_layers))
    scores, _ = tables(asked)
    heads = [(gate, i, j) for i, layer in enumerate(gates) for j, gate in enumerate(layer)]
    share = 1 - Fraction(str(asked.cache)) if ratio is None else Fraction(str(ratio))
    streaming = {each[1:] for each in sorted(heads)[: math.floor(share * len(heads))]}
    expected = [
        [min(present(r), 5) if (i, j) in streaming else present(r) for j, r in enumerate(layer)]
        for i, layer in enumerate(scores)
    ]
    got = Duo(gates, ratio, sinks=1, recent=4).allocate(asked)
    assert got.budgets.tolist() == expected
    assert got.notes == {
        "streaming_heads": len(streaming),
        "share": sum(map(sum, expected)) / (asked.length * len(heads)),
    }


def test_duo_refuses_what_its_heads_cannot_hold():
    asked = request([[[1.0] * 9] * 2], [[[True] * 4 + [False] * 5] * 2], 5)
    assert Duo(((0.1, 0.9),), 0.5, sinks=2, recent=2).allocate(asked).budgets.tolist() == [[4, 9]]
    with pytest.raises(EvictionError, match=r"sinks \+ recent = 3 entries a streaming head; allowed: the reserved 4"):
        Duo(((0.1, 0.9),), 0.5, sinks=1, recent=2).allocate(asked)
    with pytest.raises(EvictionError, match=r"cache 300 is no share of heads; allowed: 0 to 1, or ratio="):
        Duo(((0.1, 0.9),)).allocate(replace(asked, cache=300))

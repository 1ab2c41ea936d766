"""The rules of settling: loops, hypothesis, and whole numbers where floating point is wrong."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.errors import TheoryError
from kvprobe.outcomes import Settling, deep, deep_from, settling_depth

bits = st.floats(0, 1, width=32)
tables = st.integers(1, 12).flatmap(
    lambda layers: st.lists(st.lists(bits, min_size=layers, max_size=layers), min_size=1, max_size=6)
)


def by_loop(column, threshold, rule):
    """Layers from 1; the last one is close by definition."""
    last = len(column)
    close = [value <= threshold for value in column[:-1]] + [True]
    if rule == "first":
        return next(layer for layer in range(1, last + 1) if close[layer - 1])
    return next(layer for layer in range(1, last + 1) if all(close[layer - 1 :]))


@given(tables, bits)
def test_both_rules_are_loops(columns, threshold):
    divergence = torch.tensor(columns).T
    kept = divergence.clone()
    for rule in ("first", "stays"):
        depth = settling_depth(divergence, threshold, rule)
        assert depth.dtype == torch.int64
        assert depth.tolist() == [by_loop(column, threshold, rule) for column in columns]
    assert torch.equal(divergence, kept)


@given(tables, bits)
def test_first_is_the_running_minimum_and_stays_comes_no_earlier(columns, threshold):
    divergence = torch.tensor(columns).T
    first, stays = (settling_depth(divergence, threshold, rule) for rule in ("first", "stays"))
    running = divergence.cummin(0).values
    assert torch.equal(first, settling_depth(running, threshold, "first"))
    assert torch.equal(first, settling_depth(running, threshold, "stays"))
    assert bool((first <= stays).all()) and bool((first >= 1).all()) and bool((stays <= len(divergence)).all())


@given(tables, bits, bits, st.randoms())
def test_a_stricter_threshold_settles_no_earlier_and_rows_are_independent(columns, one, other, random):
    order = list(range(len(columns)))
    random.shuffle(order)
    divergence = torch.tensor(columns).T
    for rule in ("first", "stays"):
        strict, mild = (settling_depth(divergence, g, rule) for g in (min(one, other), max(one, other)))
        assert bool((strict >= mild).all())
        assert torch.equal(
            settling_depth(divergence[:, order], one, rule), settling_depth(divergence, one, rule)[order]
        )


def test_edges_of_the_rules():
    falling = torch.tensor([[0.9], [0.5], [0.6], [0.1]])
    assert settling_depth(falling).tolist() == [2]  # at the threshold is close
    assert settling_depth(falling, rule="stays").tolist() == [4]
    assert settling_depth(torch.ones(5, 2), 0.0).tolist() == [5, 5]  # the last layer always settles
    assert settling_depth(torch.zeros(5, 2), rule="stays").tolist() == [1, 1]
    assert settling_depth(torch.ones(1, 3)).tolist() == [1, 1, 1]
    assert settling_depth(torch.ones(4, 0)).tolist() == []
    assert settling_depth(torch.full((3, 1), -1e-6), 0.0).tolist() == [1]  # rounding of 0


@given(st.integers(1, 400), st.integers(1, 1000))
def test_deep_begins_at_the_smallest_layer_not_below_the_share(n_layers, thousandths):
    """ρ = k / 1000 as a decimal: the smallest whole m with 1000 m ≥ k L, by counting up."""
    expected = next(m for m in range(1, n_layers + 1) if 1000 * m >= thousandths * n_layers)
    assert deep_from(n_layers, thousandths / 1000) == expected


def test_the_share_is_a_decimal_not_a_float():
    assert [deep_from(L) for L in (12, 20, 30, 32, 40, 60)] == [11, 17, 26, 28, 34, 51]
    assert deep_from(100, 0.55) == 55 and math.ceil(0.55 * 100) == 56
    for n_layers in (20, 40, 60):  # the source's other form, for which floating point goes wrong
        assert math.ceil((1 - 0.85) * n_layers) == math.ceil((1 - Fraction("0.85")) * n_layers) + 1
        assert deep_from(n_layers, 0.15) == 3 * n_layers // 20
    assert deep_from(7, 1) == 7 and deep_from(20, Fraction(17, 20)) == 17


def test_deep_rows():
    depth = torch.tensor([1, 16, 17, 20])
    assert deep(depth, 20).tolist() == [False, False, True, True]
    assert Settling(depth, torch.zeros(20, 4), 0.5, "first").deep(0.8).tolist() == [False, True, True, True]
    assert Settling(depth, torch.zeros(20, 4), 0.5, "first").deep().tolist() == deep(depth, 20, 0.85).tolist()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: settling_depth(torch.ones(2, 2), rule="last"), r"rule='last'; allowed: first, stays"),
        (lambda: settling_depth(torch.ones(2, 2), 1.5), r"threshold=1\.5; allowed: 0 … 1 bits"),
        (lambda: settling_depth(torch.ones(2, 2), -0.1), r"threshold=-0\.1"),
        (lambda: settling_depth(torch.ones(2, 2), math.nan), r"threshold=nan"),
        (lambda: settling_depth(torch.ones(2, 2), "0.5"), r"threshold='0\.5'"),
        (lambda: settling_depth(torch.ones(2)), r"divergence has the shape \[2\]; allowed: \[layers, rows\]"),
        (lambda: settling_depth(torch.ones(0, 2)), r"shape \[0, 2\]"),
        (
            lambda: settling_depth(torch.tensor([[0.1, 0.2], [0.1, math.nan]])),
            r"the divergence of layer 2, row 1 is nan",
        ),
        (lambda: settling_depth(torch.tensor([[math.inf]])), r"layer 1, row 0 is inf"),
        (lambda: deep_from(0), r"n_layers=0; allowed: 1 or more"),
        (lambda: deep_from(2.5), r"n_layers=2\.5"),
        (lambda: deep_from(20, 0), r"rho=0; allowed: above 0 and at most 1"),
        (lambda: deep_from(20, 1.01), r"rho=1\.01"),
        (lambda: deep_from(20, math.nan), r"rho=nan"),
        (lambda: deep_from(20, "most"), r"rho='most'"),
    ],
)
def test_a_mistake_is_one_line(call, says):
    with pytest.raises(TheoryError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)

"""Sink rates: the first real position's mass by head, against numbers written by hand and Gu et al.'s definition."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sink_traces import TRACES, row_trace, slow_scores

from kvprobe import sinks
from kvprobe.errors import TheoryError


def by_hand(first, pad=0, n=8):
    """Scores whose first real position has the given mass [L][H], the next three 0.01, 0.02, 0.04."""
    first = np.array(first)
    mass = np.full((*first.shape, n), np.nan)
    mass[..., pad:] = 0.001
    mass[..., pad] = first
    mass[..., pad + 1 : pad + 4] = 0.01, 0.02, 0.04
    seen = np.ones((len(first), n), dtype=int)
    seen[:, :pad] = 0
    return sinks.Scores(mass, np.ones_like(mass), seen, np.zeros_like(first), (n - 1,), pad)


@pytest.mark.parametrize("pad", [0, 3])
def test_by_hand(pad):
    found = by_hand([[0.3, 0.31], [0.0, 0.9]], pad)
    frame = sinks.sink_rates(found)
    assert list(frame.columns) == ["layer", "head", "first", "first4", "learned", "sinky"]
    assert frame[["layer", "head"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert frame["first"].tolist() == [0.3, 0.31, 0.0, 0.9]
    assert_allclose(frame["first4"], [0.37, 0.38, 0.07, 0.97])
    assert frame["sinky"].tolist() == [False, True, False, True]  # at the threshold is not above it
    assert sinks.share(found) == 0.5 and sinks.share(found, 0.2) == 0.75 and sinks.share(found, 0.95) == 0
    assert sinks.sink_rates(found, 0.31)["sinky"].sum() == 1


@pytest.mark.parametrize("kind", TRACES.values(), ids=TRACES.keys())
def test_against_loops(kind):
    trace, pad = row_trace(**kind), kind.get("pad", 0)
    mass, _, _, learned = slow_scores(trace)
    frame = sinks.sink_rates(sinks.scores(trace), 0.1).set_index(["layer", "head"])
    for (layer, head), row in frame.iterrows():
        each = [0.0 if x != x else x for x in mass[layer, head, pad : pad + 4]]
        assert_allclose([row["first"], row["first4"]], [each[0], sum(each)], rtol=1e-10, atol=1e-15)
        assert row["sinky"] == (each[0] > 0.1)
        assert_allclose(row["learned"], learned[layer, head], atol=1e-15, rtol=1e-10)
    assert sinks.share(sinks.scores(trace), 0.1) == frame["sinky"].mean()


def test_a_first_position_behind_the_window_has_taken_nothing():
    frame = sinks.sink_rates(sinks.scores(row_trace(window=3), rows=[38, 39]), 0.0)
    assert (frame.loc[frame["layer"] == 1, "first"] == 0).all() and not frame.loc[frame["layer"] == 1, "sinky"].any()
    assert frame.loc[frame["layer"] == 0, "sinky"].all()


def test_a_prompt_of_two_tokens():
    frame = sinks.sink_rates(sinks.scores(row_trace(2, (1,))))
    assert_allclose(frame["first4"], 1.0)


@pytest.mark.parametrize("threshold", [-0.1, 1.1, "0.3", None, True, float("nan")])
def test_a_threshold_that_is_no_mass(threshold):
    for measure in (sinks.sink_rates, sinks.share):
        with pytest.raises(TheoryError, match=r"threshold=.*; allowed: a mass from 0 to 1"):
            measure(by_hand([[0.3]]), threshold)
        with pytest.raises(TheoryError, match=r"scores='x'; allowed: what sinks.scores returns"):
            measure("x")

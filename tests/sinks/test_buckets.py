"""Buckets cover every real position once, and their table is a sum over their keys."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from sink_traces import TRACES, row_trace

from kvprobe import sinks
from kvprobe.errors import PromptError
from kvprobe.sinks.bucketing import COLUMNS


def test_precedence_by_hand():
    made = sinks.buckets(
        14, evidence=[(3, 6), (5, 8), (10, 11)], secondary=[1, 2, 7, 9, 12], context_stop=10, pad=2, first=3
    )
    assert dict(made.keys) == {
        "first4": (2, 3, 4),
        "evidence": (5, 6, 7, 10),
        "secondary_sink": (9, 12),
        "other": (8,),
        "recent": (11, 13),
    }
    names = ["pad"] * 2 + ["first4"] * 3 + ["evidence"] * 3 + ["other", "secondary_sink", "evidence", "recent"]
    assert made.names().tolist() == [*names, "secondary_sink", "recent"]
    assert tuple(made.keys) == sinks.BUCKETS[:-1] and sinks.BUCKETS[-1] == "learned_sink"


def test_nothing_given():
    made = sinks.buckets(6)
    assert dict(made.keys) == {
        "first4": (0, 1, 2, 3),
        "evidence": (),
        "secondary_sink": (),
        "other": (4, 5),
        "recent": (),
    }
    assert sinks.buckets(2).keys["first4"] == (0, 1)
    assert sinks.buckets(3, context_stop=3).keys["recent"] == ()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 30), st.data())
def test_every_real_position_is_in_exactly_one(n, data):
    pad, first = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 6))
    stop = data.draw(st.none() | st.integers(pad, n))
    edges = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(1, n)), max_size=3))
    evidence = [(a, min(n, a + b)) for a, b in edges]
    secondary = data.draw(st.lists(st.integers(0, n - 1), max_size=5))
    made = sinks.buckets(n, evidence=evidence, secondary=secondary, context_stop=stop, pad=pad, first=first)
    assert sorted(key for keys in made.keys.values() for key in keys) == list(range(pad, n))
    for position in range(n):
        expected = "other"
        if position < pad:
            expected = "pad"
        elif position < pad + first:
            expected = "first4"
        elif any(a <= position < b for a, b in evidence):
            expected = "evidence"
        elif position in secondary:
            expected = "secondary_sink"
        elif stop is not None and position >= stop:
            expected = "recent"
        assert made.names()[position] == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pad": 8}, r"pad=8 with n = 8 keys; allowed: 0 <= pad < n"),
        ({"first": -1}, r"first=-1; allowed: a whole number of at least 0"),
        ({"first": 2.5}, r"first=2.5; allowed: a whole number of at least 0"),
        ({"pad": -1}, r"pad=-1; allowed: a whole number of at least 0"),
        ({"pad": "1"}, r"pad='1'; allowed: a whole number"),
        ({"context_stop": 4.0}, r"context_stop=4.0; allowed: a whole number"),
        ({"secondary": [1.5]}, r"secondary sink at position 1.5; allowed: 0 … 7"),
        ({"secondary": ["x"]}, r"secondary sink at position 'x'; allowed: 0 … 7"),
        ({"context_stop": 9}, r"context_stop=9; allowed: 0 … 8, or None"),
        ({"context_stop": 1, "pad": 2}, r"context_stop=1; allowed: 2 … 8"),
        ({"evidence": [(5, 9)]}, r"span \(5, 9\) with n = 8"),
        ({"secondary": [8]}, r"secondary sink at position 8; allowed: 0 … 7"),
        ({"secondary": [-1]}, r"secondary sink at position -1"),
    ],
)
def test_what_is_refused(given, says):
    with pytest.raises(PromptError, match=says):
        sinks.buckets(8, **given)
    for n in ("x", 0, 8.0):
        with pytest.raises(PromptError, match=r"n=.*; allowed: a whole number of at least 1"):
            sinks.buckets(n)


@pytest.mark.parametrize("kind", TRACES.values(), ids=TRACES.keys())
@pytest.mark.parametrize("epsilon", [0.0, 0.03])
def test_the_table_is_a_sum_over_keys(kind, epsilon):
    found = sinks.scores(row_trace(**kind))
    made = sinks.buckets(40, evidence=[(8, 13)], secondary=[20], context_stop=36, pad=kind.get("pad", 0))
    frame = found.bucket_table(made, epsilon)
    assert tuple(frame.columns) == COLUMNS
    expected = [*sinks.BUCKETS[:-1]] + (["learned_sink"] if kind.get("sink") else [])
    assert frame["bucket"].tolist() == expected * (2 * found.shape[1])
    assert frame["layer"].is_monotonic_increasing and not frame.duplicated(["layer", "head", "bucket"]).any()
    for row in frame.itertuples():
        if row.bucket == "learned_sink":
            assert row.mass == row.mass_per_token == found.learned[row.layer, row.head] > 0
            assert (row.value_mass, row.value, row.ratio, row.value_mass_per_token) == (0, 0, 0, 0)
            assert (row.n_tokens, row.n_seen) == (1, 1)
            continue
        keys = [key for key in made.keys[row.bucket] if found.seen[row.layer, key]]
        s = [found.mass[row.layer, row.head, key] for key in keys]
        m = [found.norms[row.layer, row.head, key] for key in keys]
        mass, value = sum(s), sum(a * b for a, b in zip(s, m, strict=True))
        value_mass = sum((a + epsilon) * b for a, b in zip(s, m, strict=True))
        assert (row.n_tokens, row.n_seen) == (len(made.keys[row.bucket]), len(keys))
        assert_allclose([row.mass, row.value_mass, row.value], [mass, value_mass, value], rtol=1e-12, atol=1e-15)
        per_token = [mass / len(keys), value_mass / len(keys)] if keys else [np.nan] * 2
        assert_allclose([row.mass_per_token, row.value_mass_per_token], per_token, rtol=1e-12)
        assert_allclose(row.ratio, value / mass if mass else np.nan, rtol=1e-12)


def test_a_window_sees_nothing_of_the_beginning():
    found = sinks.scores(row_trace(window=6), rows=[38, 39])
    frame = found.bucket_table(sinks.buckets(40)).set_index(["layer", "head", "bucket"])
    far, near = frame.loc[1, 0, "first4"], frame.loc[0, 0, "first4"]
    assert far["n_seen"] == 0 and far["mass"] == far["value_mass"] == 0
    assert np.isnan([far["ratio"], far["mass_per_token"], far["value_mass_per_token"]]).all()
    assert near["n_seen"] == 4 and near["mass"] > 0


def test_the_table_takes_the_scores_own_epsilon():
    found, made = sinks.scores(row_trace(), epsilon=0.2), sinks.buckets(40)
    assert found.bucket_table(made).equals(found.bucket_table(made, 0.2))
    assert not found.bucket_table(made).equals(found.bucket_table(made, 0.1))


@pytest.mark.parametrize("other", [{"n": 39}, {"n": 40, "pad": 1}])
def test_buckets_of_another_prompt(other):
    with pytest.raises(PromptError, match=r"allowed: as many as the scores have, 40 with 0 pads"):
        sinks.scores(row_trace()).bucket_table(sinks.buckets(**other))

"""Head profiles: what is written is read, and nothing else."""

import json

import pytest
import torch
from budget_requests import request
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.errors import DataError, EvictionError, RecordError
from kvprobe.eviction.budgets import Duo, HeadKV, HeadProfile, read_gates, read_profile, write_profile

GOOD = {"model": "m", "kind": "retrieval", "n_layers": 2, "n_heads": 3, "scores": [[0.5, 0.25, 0], [1, 0, 0]]}


def written(tmp_path, content, name="p.json"):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_profile_survives_the_disk(tmp_path_factory, data):
    n_layers, n_heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    row = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=n_heads, max_size=n_heads)
    scores = data.draw(st.lists(row, min_size=n_layers, max_size=n_layers))
    facts = data.draw(st.dictionaries(st.sampled_from(["seed", "trials"]), st.integers() | st.text(max_size=5)))
    profile = HeadProfile("a/model", "reasoning", scores, facts)
    path = write_profile(profile, tmp_path_factory.mktemp("profiles") / "new" / "p.json")
    assert read_profile(path) == read_profile(str(path), "a/model") == profile
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content == {"model": "a/model", "kind": "reasoning", "n_layers": n_layers, "n_heads": n_heads} | {
        "scores": scores
    } | dict(facts)


def test_a_profile_takes_tensors_and_knows_its_shape():
    profile = HeadProfile("m", "retrieval", torch.tensor([[0.5, 0.25, 0.0], [1.0, 0.0, 0.0]]))
    assert profile.scores == ((0.5, 0.25, 0.0), (1.0, 0.0, 0.0))
    assert (profile.n_layers, profile.n_heads) == (2, 3)


def test_headkv_reads_a_path_as_it_takes_a_table(tmp_path):
    path = written(tmp_path, GOOD)
    assert HeadKV(path) == HeadKV(str(path)) == HeadKV(GOOD["scores"])
    asked = request([[[0.0] * 40] * 3] * 2, [[[False] * 40] * 3] * 2, 7)
    assert HeadKV(path, beta=1).allocate(asked).budgets.tolist() == [[12, 6, 0], [24, 0, 0]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([1, 2], r"is no head profile: \[1, 2\]; allowed: an object with model, kind, n_layers, n_heads, scores"),
        ({k: v for k, v in GOOD.items() if k != "kind"}, "it lacks kind; allowed: model, kind"),
        (GOOD | {"n_heads": 4}, r"says n_layers, n_heads = \[2, 4\], and its scores have shape \[2, 3\]"),
        (GOOD | {"n_layers": 3}, r"says n_layers, n_heads = \[3, 3\], and its scores have shape \[2, 3\]"),
        (
            GOOD | {"scores": [[0.5, 0.25, float("nan")], [1, 0, 0]]},
            "scores is nan at layer 0, head 2; allowed",
        ),
        (GOOD | {"scores": [[1, 0, 0], [1, float("inf"), 0]]}, "scores is inf at layer 1, head 1; allowed: finite"),
        (GOOD | {"scores": [[1, 0, None], [1, 0, 0]]}, "allowed: a table of numbers, layers × heads"),
        (GOOD | {"scores": [1, 0]}, "allowed: a table of numbers, layers × heads"),
        (GOOD | {"scores": [[1, 0, 0], [1, 0]]}, "scores has rows of .* allowed: one length"),
        (GOOD | {"scores": [[], []]}, "scores has rows of .* allowed: one length"),
        (GOOD | {"model": 3}, "model=3; allowed: text"),
        (GOOD | {"kind": ""}, "kind=''; allowed: text"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, content, message):
    path = written(tmp_path, content)
    for read in (read_profile, HeadKV):
        with pytest.raises(DataError, match=message) as caught:
            read(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_profile_of_another_model_is_refused_with_both_names(tmp_path):
    with pytest.raises(DataError, match=r"is a profile of 'm'; allowed: one of 'llama'"):
        read_profile(written(tmp_path, GOOD), "llama")


def test_files_that_cannot_be_read_or_written(tmp_path):
    for read in (read_profile, read_gates, HeadKV, Duo):
        with pytest.raises(DataError, match=r"cannot read .*gone.json: No such file"):
            read(str(tmp_path / "gone.json"))
        with pytest.raises(DataError, match=r"cannot read .*: Is a directory"):
            read(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for read in (read_profile, read_gates):
        with pytest.raises(DataError, match="binary is not a text file"):
            read(tmp_path / "binary")
    with pytest.raises(RecordError, match=r"p.txt must end in .json"):
        write_profile(HeadProfile("m", "retrieval", ((1.0,),)), tmp_path / "p.txt")


def test_facts_cannot_stand_in_for_the_profile():
    with pytest.raises(EvictionError, match="facts name 'scores'; allowed: names other than model, kind"):
        HeadProfile("m", "retrieval", ((1.0,),), {"scores": 3})


def test_gates_are_a_table_with_tabs_or_spaces(tmp_path):
    rows = ((0.25, 1.0, 0.0), (1e-3, 0.5, 1.0))
    for gap in ("\t", "  "):
        text = "\n".join(gap.join(map(repr, row)) for row in rows) + "\n\n"
        path = written(tmp_path, text, "gates.tsv")
        assert read_gates(path) == rows and Duo(path) == Duo(str(path)) == Duo(rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5\tx\n", "is no table of layers × kv heads: could not convert string to float: 'x'"),
        ("0.5\t1\n0.5\n", "is no table of layers × kv heads: gates has rows of .* allowed: one length"),
        ("0.5\tnan\n", "gates is nan at layer 0, head 1; allowed: finite"),
        ("", "gates has rows of .* allowed: one length"),
    ],
)
def test_what_is_no_table_of_gates_is_refused(tmp_path, text, message):
    path = written(tmp_path, text, "gates.tsv")
    for read in (read_gates, Duo):
        with pytest.raises(DataError, match=message):
            read(path)


def test_gates_outside_the_unit_interval_are_refused(tmp_path):
    with pytest.raises(EvictionError, match=r"gates hold -0.5; allowed: numbers between 0 and 1"):
        Duo(written(tmp_path, "0.5 -0.5\n", "gates.tsv"))

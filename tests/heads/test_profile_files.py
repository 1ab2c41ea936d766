"""A profile that was made is one that budgets read: its file, its schema, gates, and whose it is."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from budget_requests import request
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe import cli, embedded
from kvprobe.errors import DataError, EvictionError, RecordError
from kvprobe.eviction.budgets import Duo, HeadKV, HeadProfile, read_gates, read_profile, write_gates, write_profile
from kvprobe.heads import Grid, profile

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "head_profile.schema.json").read_text(encoding="utf-8"))
TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
    "null": type(None),
}


def complaints(value, schema, path="profile"):
    """What a value breaks of a schema: the words of JSON Schema that ours uses, and no other."""
    known = {"$schema", "title", "description", "type", "required", "properties", "items", "minItems", "enum"}
    assert set(schema) <= known | {"minLength", "minimum", "maximum"}
    kinds = schema.get("type", list(TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(value, bool) or not any(isinstance(value, TYPES[kind]) for kind in kinds):
        return [f"{path} is no {kinds}"]
    found = [f"{path} lacks {name}" for name in schema.get("required", ()) if name not in value]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{path} is not of {schema['enum']}")
    if isinstance(value, (str, list)) and len(value) < schema.get("minLength", schema.get("minItems", 0)):
        found.append(f"{path} is too short")
    if isinstance(value, (int, float)) and not schema.get("minimum", -1e300) <= value <= schema.get("maximum", 1e300):
        found.append(f"{path} is out of bounds")
    parts = enumerate(value) if isinstance(value, list) and "items" in schema else ()
    found += [line for i, part in parts for line in complaints(part, schema["items"], f"{path}[{i}]")]
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            found += complaints(value[name], inner, f"{path}.{name}") if name in value else []
    return found


@pytest.fixture(scope="module")
def made(smol, tmp_path_factory):
    """A profile of the embedded model, from three short trials, and its file."""
    found = profile(smol, Grid(lengths=(220,), depths=(20, 50, 80), seeds=(0,), new_tokens=12))
    return found, write_profile(found, tmp_path_factory.mktemp("profiles") / "heads.json")


def test_a_profile_of_the_embedded_model(made):
    found, path = made
    scores = np.array(found.scores)
    assert scores.shape == (30, 9) and scores.min() == 0 and 0.5 < scores.max() <= 1
    assert found.facts["revision"] == embedded.SMOLLM2_135M.weights_sha256
    assert found.facts["n"] == 3 and 1 <= found.facts["n_kept"] <= 3
    assert read_profile(path, "smollm2-135m") == found


def test_its_file_is_what_the_schema_says(made):
    content = json.loads(made[1].read_text(encoding="utf-8"))
    assert complaints(content, SCHEMA) == [] and set(content) == set(SCHEMA["properties"])
    for name, wrong in {"n": 0, "scores": [["x"]], "depths": [101], "span": "key", "revision": 3, "kind": ""}.items():
        assert len(complaints(content | {name: wrong}, SCHEMA)) == 1
    assert complaints({}, SCHEMA) == [f"profile lacks {name}" for name in SCHEMA["required"]]


def test_budgets_run_from_a_profile_that_was_made(made, at_hand, tmp_path, capsys):
    """``kvprobe evict`` end to end: HeadKV takes importance and DuoAttention gates from the one file."""
    words = f"--policies headkv,duo --profile {made[1]} --items 1 --length 1300 --cache 0.5 --new-tokens 2 --json"
    with at_hand():
        assert cli.main(["evict", *words.split(), "--out", str(tmp_path / "run")]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["policy"] for row in summary["rows"]] == ["snapkv+headkv", "streaming+duo"]
    headkv, duo = (each["budget"] for each in summary["policies"])
    np.testing.assert_allclose(headkv["importance"], made[0].scores)
    np.testing.assert_allclose(np.max(duo["gates"]), 1)
    assert summary["rows"][1]["notes"]["streaming_heads"] == 45 and 0.4 < summary["rows"][0]["kept"] <= 0.5


def test_a_profile_of_another_model_is_refused_by_the_command(made, tiny_folder, capsys, tmp_path):
    words = f"--policies duo --profile {made[1]} --items 1 --length 900 --model {tiny_folder('llama')}"
    assert cli.main(["evict", *words.split(), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("kvprobe: ") and error.endswith("is a profile of 'smollm2-135m'; allowed: one of 'llama'")


def test_folders_before_a_model_s_name_do_not_count(tmp_path):
    path = write_profile(HeadProfile("meta/Llama-8B", "retrieval", ((1.0,),)), tmp_path / "p.json")
    assert read_profile(path, "Llama-8B") == read_profile(path, "meta/Llama-8B") == read_profile(path)
    with pytest.raises(DataError, match=r"is a profile of 'meta/Llama-8B'; allowed: one of 'meta/Llama-1B'"):
        read_profile(path, "meta/Llama-1B")


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_gates_of_a_profile_are_the_largest_shares_of_a_group(data):
    """Against loops: the heads that stream are those of the lowest max over query heads of score / largest score."""
    n_layers, n_sets, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(2, 4))
    row = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.5, 7.0]), min_size=n_sets * group, max_size=n_sets * group)
    scores = data.draw(st.lists(row, min_size=n_layers, max_size=n_layers))
    scores[0][0] += 0.125
    ratio = data.draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
    n, gates = 12, {}
    for layer in range(n_layers):
        for kept in range(n_sets):
            gates[layer, kept] = max(scores[layer][kept * group + i] for i in range(group)) / max(map(max, scores))
    streaming = sorted(gates, key=lambda place: (gates[place], place))[: int(ratio * len(gates))]
    duo = Duo(HeadProfile("m", "retrieval", scores), ratio=ratio, sinks=2, recent=3)
    asked = request([[[0.0] * n] * n_sets] * n_layers, [[[False] * n] * n_sets] * n_layers, n // 2, group=group)
    budgets = duo.allocate(asked).budgets.tolist()
    expected = [[5 if (layer, k) in streaming else n for k in range(n_sets)] for layer in range(n_layers)]
    assert budgets == expected


def test_gates_may_be_given_as_a_profile_its_file_or_a_table(tmp_path):
    scores = ((0.5, 0.0), (2.0, 1.0))
    path = write_profile(HeadProfile("m", "retrieval", scores), tmp_path / "p.json")
    assert Duo(path) == Duo(str(path)) == Duo(read_profile(path)) == Duo(((0.25, 0.0), (1.0, 0.5)))
    table = write_gates(tmp_path / "gates.tsv", torch.tensor([[1 / 3, 0.0], [1.0, 0.5]], dtype=torch.float64))
    assert table.read_text(encoding="utf-8") == "0.3333333333333333\t0.0\n1.0\t0.5\n"
    assert Duo(table).gates == read_gates(table) == ((1 / 3, 0.0), (1.0, 0.5))
    with pytest.raises(RecordError, match=r"gates.json must end in .tsv"):
        write_gates(tmp_path / "gates.json", scores)


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (((0.0, 0.0),), "every head of m has the score 0; allowed: at least one score > 0"),
        (((1.0, -0.5),), "the profile of m holds the score -0.5; allowed: numbers ≥ 0"),
    ],
)
def test_scores_that_make_no_gates_are_refused(scores, said):
    with pytest.raises(EvictionError, match=said):
        Duo(HeadProfile("m", "retrieval", scores))
    with pytest.raises(EvictionError, match="importance"):
        HeadKV(HeadProfile("m", "retrieval", scores))


def test_gates_of_neither_shape_are_refused():
    asked = request([[[0.0] * 9] * 2], [[[False] * 9] * 2], 4, group=3)
    with pytest.raises(EvictionError, match=r"gates of shape \[1, 3\]; allowed: \[1, 2\], .*or \[1, 6\], query heads"):
        Duo(((1.0, 0.0, 0.5),)).allocate(asked)


def test_the_revision_is_the_commit_or_the_embedded_sha256_or_nothing(tmp_path):
    """A folder that merely has the embedded model's name is not taken for it."""
    folder = tmp_path / "smollm2-135m"
    folder.mkdir()
    plain = SimpleNamespace(_name_or_path=str(folder))
    assert embedded.revision(plain) is None
    assert embedded.revision(SimpleNamespace(_name_or_path="org/name", _commit_hash="abc")) == "abc"
    for content in ("{", "[]", '{"source": {}}'):
        (folder / embedded.MANIFEST).write_text(content)
        assert embedded.revision(plain) is None
    (folder / embedded.MANIFEST).write_text('{"source": {"weights_sha256": "ff"}}')
    assert embedded.revision(plain) == "ff"

"""A run that was interrupted goes on: nothing is computed twice, and its results are those of one that was not."""

import json

import fault_runs
import pandas as pd
import pytest
from fault_runs import command, results, words

from kvprobe import parts
from kvprobe.parts import store

UNITS = {"sinks docs": "documents", "map": "documents", "audit": "documents", "heads": "trials"}


@pytest.fixture
def computed(monkeypatch):
    """Names of what is computed, in order; ``stop`` is the number of the part behind which Ctrl-C comes, if any."""

    class Names(list):
        stop = None

    names, real = Names(), store.afresh

    def afresh(name, compute):
        if len(names) == names.stop:
            raise KeyboardInterrupt
        names.append(name)
        return real(name, compute)

    monkeypatch.setattr(store, "afresh", afresh)
    return names


FIRST, *OTHERS = fault_runs.COMMANDS


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_every_experiment_goes_on_where_it_was_interrupted(name, quick, computed, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    status, _, said = command(words(name, quick, "--out", whole))
    assert status == 0 and not said, said
    every = list(computed)
    assert len(every) >= 2 and len(set(every)) == len(every)

    computed.clear()
    computed.stop = len(every) // 2 + (len(every) > 4)
    status, _, said = command(words(name, quick, "--out", out))
    told = json.loads((out / "manifest.json").read_text())
    assert status == 130 and told["status"] == "interrupted" and told["error"].startswith("KeyboardInterrupt")
    assert f"{computed.stop} finished parts are in {out}" in said and "the same command goes on" in said
    assert computed == every[: computed.stop] and not list(out.glob("*.parquet"))

    computed.clear()
    computed.stop = None
    status, _, said = command(words(name, quick, "--out", out, "--json"))
    unit = UNITS.get(name, "items")
    ours = [part for part in every if part.split(" ")[0] == unit.removesuffix("s")]
    first = sum(part in ours for part in every[: len(every) - len(computed)])
    total = 2 if name == "heads" else len(ours)
    assert status == 0 and said == f"kvprobe: resuming: {first} of {total} {unit} found in {out}\n"
    assert computed == every[len(every) - len(computed) :] and len(computed) < len(every)
    assert results(out) == results(whole)
    assert not list(out.rglob(".*"))


def test_parts_make_no_difference(quick, tmp_path):
    """With a folder every result goes through a file, without one through none."""
    _, lines, _ = command(words("sinks docs", quick, "--json"))
    assert command(words("sinks docs", quick, "--out", tmp_path / "out"))[0] == 0
    ours, theirs = json.loads(lines.splitlines()[-1]), json.loads((tmp_path / "out" / "summary.json").read_text())
    assert fault_runs.timeless(ours, tmp_path) == fault_runs.timeless(theirs, tmp_path)


@pytest.fixture
def ended(quick, computed, tmp_path):
    """A folder in which a run over two documents was ended behind the first."""
    out = tmp_path / "out"
    computed.stop = 1
    assert command(words("sinks docs", quick, "--out", out))[0] == 130
    computed.clear()
    computed.stop = None
    return out


@pytest.mark.parametrize(
    ("more", "differs"),
    [
        (["--seed", "5"], "arguments.seed, seed"),
        (["--epsilons", "0,1e-5"], "arguments.epsilons"),
        (["--norm", "2"], "arguments.norm"),
    ],
)
def test_a_run_that_asks_something_else_begins_anew(more, differs, ended, quick, computed):
    status, _, said = command(words("sinks docs", quick, "--out", ended, *more))
    assert status == 0 and computed == ["document 0", "document 1"]
    assert said == f"kvprobe: {ended} has 1 parts of a run that differs in {differs}: they are not used\n"


def test_a_text_that_was_changed_since_is_read_again(ended, quick, computed):
    path = sorted(quick["docs"].iterdir())[0]
    text = path.read_text()
    try:
        path.write_text(text + " And more.")
        status, _, said = command(words("sinks docs", quick, "--out", ended))
    finally:
        path.write_text(text)
    assert status == 0 and computed == ["document 0", "document 1"] and "differs in inputs.docs: " in said


def test_other_weights_under_the_same_name_begin_anew(ended, quick, computed):
    weights = quick["model"] / "model.safetensors"
    weights.touch()
    status, _, said = command(words("sinks docs", quick, "--out", ended))
    assert status == 0 and computed == ["document 0", "document 1"] and "inputs.model, model.files: " in said


def test_other_versions_begin_anew(ended, quick, computed, monkeypatch):
    from kvprobe.records import asked

    real = asked.versions
    monkeypatch.setattr(asked, "versions", lambda: real() | {"torch": "9.9"})
    status, _, said = command(words("sinks docs", quick, "--out", ended))
    assert status == 0 and computed == ["document 0", "document 1"] and "differs in versions.torch: " in said


def test_a_damaged_part_is_computed_again_and_nothing_else(ended, quick, computed, tmp_path):
    (part,) = ended.rglob("*.part")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    status, _, said = command(words("sinks docs", quick, "--out", ended))
    assert status == 0 and computed == ["document 0", "document 1"]
    assert f"{part} is damaged (it is not as it was written): document 0 is computed again" in said
    assert command(words("sinks docs", quick, "--out", tmp_path / "whole"))[0] == 0
    assert results(ended) == results(tmp_path / "whole")


def test_a_complete_folder_is_run_afresh(quick, computed, tmp_path):
    for _ in range(2):
        computed.clear()
        assert command(words("sinks docs", quick, "--out", tmp_path / "out"))[0] == 0
        assert computed == ["document 0", "document 1"]


def test_one_bad_item_is_named_and_loses_no_other(quick, computed, tmp_path, monkeypatch):
    from kvprobe.errors import InterventionError
    from kvprobe.placebo import tables

    real = tables.probe_item

    def probe(model, settings, item, index):
        if index == 2:
            raise InterventionError("the third is bad")
        return real(model, settings, item, index)

    out = tmp_path / "out"
    monkeypatch.setattr(tables, "probe_item", probe)
    status, _, said = command(words("placebo", quick, "--out", out))
    assert status == 2 and said == "kvprobe: item 2: the third is bad\n"
    told = json.loads((out / "manifest.json").read_text())
    assert told["status"] == "failed" and told["error"] == "InterventionError: item 2: the third is bad"
    monkeypatch.setattr(tables, "probe_item", real)
    computed.clear()
    status, _, said = command(words("placebo", quick, "--out", out))
    assert status == 0 and computed == ["item 2"] and "resuming: 2 of 3 items" in said
    assert pd.read_parquet(out / "items.parquet")["item"].tolist() == [0, 1, 2]


def test_parts_are_small(quick, tmp_path, monkeypatch):
    sizes = {}
    real = store.dumps
    monkeypatch.setattr(store, "dumps", lambda name, value: sizes.setdefault(name, real(name, value)))
    assert command(words("niah", quick, "--out", tmp_path / "out"))[0] == 0
    assert set(sizes) == {"item 0", "item 1"} and all(len(each) < 1 << 20 for each in sizes.values())
    assert parts.loads(sizes["item 0"], "item 0").features["mass"].ndim == 4

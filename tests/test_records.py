"""Run folders: whole files or none, nobody else's files, and a manifest that tells the truth."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from kvprobe import __version__, records
from kvprobe.errors import RecordError
from kvprobe.versions import versions

matplotlib.use("agg")


def start(path, **changes):
    return records.run(path, **({"command": "niah", "arguments": {"items": 2}, "seed": 0} | changes))


def manifest(path):
    return json.loads((path / "manifest.json").read_text())


def make_figure():
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([0, 1], [1, 0])
    return figure


def table(n=3):
    return pd.DataFrame({"layer": range(n), "mass": np.linspace(0, 1, n)})


def test_a_run_is_written_and_described(tmp_path):
    out = tmp_path / "deep" / "out"
    with start(out, model="tiny", weight_processing="raw", arguments={"items": 2, "docs": Path("docs")}) as run:
        run.table(table(), "scores.parquet")
        run.figure(make_figure(), "figures/scores.png")
        run.json({"accuracy": 1.0}, "result.json")
        assert manifest(out)["status"] == "running"
    told = manifest(out)
    assert told["status"] == "complete" and told["schema"] == "kvprobe-run/1"
    assert told["outputs"] == ["figures/scores.png", "result.json", "scores.parquet"]
    assert told["command"] == "niah" and told["arguments"] == {"items": 2, "docs": "docs"} and told["seed"] == 0
    assert told["model"] == "tiny" and told["weight_processing"] == "raw"
    assert {"python", "kvprobe", "torch", "transformers", "transformer-lens"} <= told["versions"].keys()
    assert told["elapsed_s"] >= 0 and told["peak_rss_mib"] > 1
    pd.testing.assert_frame_equal(pd.read_parquet(out / "scores.parquet"), table())
    assert not list(out.rglob("*.tmp"))


def test_facts_learnt_on_the_way(tmp_path):
    with start(tmp_path) as run:
        run.update(weight_processing="folded")
        assert manifest(tmp_path)["weight_processing"] == "folded"
    assert manifest(tmp_path)["weight_processing"] == "folded"


def test_a_failed_run_says_so_and_keeps_what_it_wrote(tmp_path):
    with pytest.raises(ZeroDivisionError), start(tmp_path) as run:
        run.table(table(5), "second.parquet")
        raise ZeroDivisionError("by zero")
    told = manifest(tmp_path)
    assert told["status"] == "failed" and told["error"] == "ZeroDivisionError: by zero"
    assert told["outputs"] == ["second.parquet"] and len(pd.read_parquet(tmp_path / "second.parquet")) == 5
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "second.parquet"]


def test_complete_results_stay_as_they_are_until_the_next_run_is_complete(tmp_path):
    """While a later run goes on, and where it fails, the manifest tells of the files beside it and notes the other."""
    with start(tmp_path, arguments={"items": 3}) as run:
        run.table(table(3), "scores.parquet")
        run.json({}, "old.json")
    whole = {name: (tmp_path / name).read_bytes() for name in ("scores.parquet", "old.json")}
    before = manifest(tmp_path)
    with pytest.raises(ZeroDivisionError), start(tmp_path, arguments={"items": 5}) as run:
        assert run.table(table(5), "scores.parquet") == tmp_path / "scores.parquet"
        run.json({}, "new.json")
        running = manifest(tmp_path)
        raise ZeroDivisionError("by zero")
    assert {name: (tmp_path / name).read_bytes() for name in whole} == whole and not (tmp_path / "new.json").exists()
    for told, status in ((running, "running"), (manifest(tmp_path), "failed")):
        later = told.pop("later")
        assert told == before and told["status"] == "complete" and later["status"] == status
        assert later["arguments"] == {"items": 5} and later["outputs"] == ["new.json", "scores.parquet"]
    assert len(pd.read_parquet(tmp_path / later["outputs_in"] / "scores.parquet")) == 5  # nothing computed is lost
    with start(tmp_path, arguments={"items": 7}) as run:
        run.table(table(7), "scores.parquet")
    told = manifest(tmp_path)
    assert told["status"] == "complete" and "later" not in told and told["arguments"] == {"items": 7}
    assert len(pd.read_parquet(tmp_path / "scores.parquet")) == 7
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "scores.parquet"]


def test_at_no_step_of_the_exchange_is_a_manifest_wrong(tmp_path, monkeypatch):
    """Killed at any step: a manifest that says complete has exactly its own files beside it."""
    with start(tmp_path, arguments={"items": 1}) as run:
        for name in ("a", "b"):
            run.json(1, f"{name}.json")

    def check(*said):
        told = manifest(tmp_path)
        if told["status"] == "complete":
            items = told["arguments"]["items"]
            assert {json.loads((tmp_path / name).read_text()) for name in told["outputs"]} == {items}
        steps.append((told["status"], told.get("earlier_outputs")))

    steps = []
    real, unlink = os.replace, Path.unlink
    monkeypatch.setattr(os, "replace", lambda *paths: (check(), real(*paths), check()))
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: (check(), unlink(path, missing_ok), check()))
    with start(tmp_path, arguments={"items": 2}) as run:
        for name in ("b", "c"):
            run.json(2, f"{name}.json")
    assert ("running", ["a.json"]) in steps and steps[-1] == ("complete", None) and len(steps) > 20


def test_a_later_run_replaces_an_earlier_one_and_nothing_else(tmp_path):
    with start(tmp_path) as run:
        run.table(table(3), "scores.parquet")
        run.json({}, "old.json")
    (tmp_path / "notes.txt").write_text("mine")
    with start(tmp_path) as run:
        run.table(table(5), "scores.parquet")
        assert (tmp_path / "old.json").exists()  # until the new run is whole
    assert len(pd.read_parquet(tmp_path / "scores.parquet")) == 5
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "notes.txt", "scores.parquet"]


def test_a_killed_run_is_known_to_the_next(tmp_path):
    child = os.fork()
    if not child:
        with start(tmp_path) as run:
            run.json({}, "half.json")
            os._exit(0)  # as if killed: nothing is closed
    os.waitpid(child, 0)
    assert manifest(tmp_path)["status"] == "running" and (tmp_path / "half.json").exists()
    with start(tmp_path) as run:
        run.json({}, "whole.json")
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "whole.json"]


@pytest.mark.parametrize("name", ["../outside.json", "/outside.json"])
def test_a_manifest_cannot_have_files_outside_its_folder_removed(tmp_path, name):
    out = tmp_path / "out"
    with start(out):
        pass
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    forged = manifest(out) | {"outputs": [name if name.startswith("..") else str(outside)]}
    (out / "manifest.json").write_text(json.dumps(forged))
    with start(out):
        pass
    assert outside.exists()


@pytest.mark.parametrize("there", ["thesis.tex", "manifest.json"])
def test_a_folder_of_something_else_is_refused(tmp_path, there):
    (tmp_path / there).write_text('{"name": "a browser extension"}')
    with pytest.raises(RecordError, match="not of a kvprobe run") as caught, start(tmp_path):
        pass
    assert str(tmp_path) in str(caught.value)
    assert os.listdir(tmp_path) == [there]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(RecordError, match="is a file"), start(tmp_path / "out"):
        pass
    with pytest.raises(RecordError, match="cannot make the folder"), start(tmp_path / "out" / "below"):
        pass
    with pytest.raises(RecordError, match="cannot write"):
        records.write_json({}, tmp_path / "out" / "a.json")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = records.write_table(table(), tmp_path / "scores.parquet")
    with pytest.raises(TypeError):
        records.write_table(HalfWritten(), path)
    pd.testing.assert_frame_equal(pd.read_parquet(path), table())
    assert os.listdir(tmp_path) == ["scores.parquet"]


class HalfWritten:
    """A table whose writing stops in the middle."""

    def to_parquet(self, target, index):
        Path(target).write_bytes(b"half")
        raise TypeError("no such column type")


def test_the_same_figure_is_the_same_bytes(tmp_path):
    for kind in ("png", "svg", "pdf"):
        with matplotlib.rc_context({"svg.hashsalt": "kvprobe"}):
            first = records.write_figure(make_figure(), tmp_path / f"a.{kind}").read_bytes()
            assert records.write_figure(make_figure(), tmp_path / f"b.{kind}").read_bytes() == first
    small = records.write_figure(make_figure(), tmp_path / "small.png", dpi=50)
    assert small.stat().st_size < (tmp_path / "a.png").stat().st_size


@pytest.mark.parametrize(
    ("write", "name", "allowed"),
    [
        (lambda path: records.write_table(table(), path), "scores.csv", r"\.parquet"),
        (lambda path: records.write_figure(make_figure(), path), "scores.gif", r"\.png or \.pdf or \.svg"),
        (lambda path: records.write_json({}, path), "scores", r"\.json"),
    ],
)
def test_endings(tmp_path, write, name, allowed):
    with pytest.raises(RecordError, match=allowed):
        write(tmp_path / name)


def test_json_is_standard():
    value = {"a": np.float32(0.5), "b": np.array([1, 2]), "c": math.nan, "d": (Path("x"), None, True), 3: [math.inf]}
    text = records.to_json(value)
    assert json.loads(text) == {"a": 0.5, "b": [1, 2], "c": None, "d": ["x", None, True], "3": [None]}
    assert "\n" not in text


def test_versions_are_those_installed():
    found = versions("numpy", "no-such-distribution")
    assert found["numpy"] == np.__version__ and found["no-such-distribution"] == "absent"
    assert versions()["kvprobe"] == __version__


def test_peak_memory_counts_what_was_held():
    code = (
        "from kvprobe.records import peak_rss_mib; before = peak_rss_mib(); held = b'1' * (200 << 20); "
        "del held; print(peak_rss_mib() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 195 < float(done.stdout) < 250

"""A disk that is full, a folder that cannot be written: one line, no half file, and what is finished is kept."""

import errno
import io
import json
import os
import resource

import pandas as pd
import pytest
from fault_runs import ITEMS, command, ended, forked, readable, results, small_run, words

from kvprobe import records
from kvprobe.errors import RecordError


def limited(most, work, said):
    """The exit status of ``work`` in a child whose files may not grow beyond ``most`` bytes."""

    def inside():
        import sys

        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        sys.stderr = io.StringIO()
        try:
            return work()
        finally:
            os.write(said, sys.stderr.getvalue().encode())

    return ended(forked(inside))


@pytest.fixture(scope="module")
def whole():
    """Results of the first run, to compare the others with."""
    return {}


@pytest.mark.parametrize("most", [0, 300, 25_000])
def test_files_that_may_not_grow(most, quick, whole, tmp_path):
    """EFBIG, from the system itself, at whichever file is too large first."""
    given = words("sinks docs", quick, "--out", tmp_path / "out")
    reading, writing = os.pipe()
    status = limited(most, lambda: __import__("kvprobe.cli").cli.main(given), writing)
    os.close(writing)
    lines = os.read(reading, 1 << 16).decode().splitlines()
    os.close(reading)
    assert status == 2 and len(lines) == 1
    assert lines[0].startswith("kvprobe: ") and str(tmp_path / "out") in lines[0] and "File too large" in lines[0]
    left = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.name != "lock"]
    assert all(path.suffix in (".json", ".part", ".parquet", ".png") for path in left)
    kept = sum(path.suffix == ".part" for path in left)
    status, _, said = command(given)
    assert status == 0 and ("resuming" in said) == (kept > 0)
    first = whole.setdefault("results", results(tmp_path / "out"))
    assert results(tmp_path / "out") == first


@pytest.mark.parametrize("earlier", [False, True], ids=["into an empty folder", "over complete results"])
def test_a_disk_that_is_full_at_any_file(earlier, tmp_path, monkeypatch):
    """ENOSPC behind the first bytes of the n-th file, for every n."""
    for module in (records.asked, records.folder):
        monkeypatch.setattr(module, "versions", dict)
    failed, done, number = set(), False, 0
    while not done:
        out = tmp_path / str(number)
        if earlier:
            small_run(out, 2)
        with monkeypatch.context() as patched:
            full = Full(number, io.open)
            patched.setattr(io, "open", full)
            try:
                small_run(out)
                done = True
            except RecordError as error:
                assert "\n" not in str(error) and str(error).endswith(": No space left on device")
                failed.add(str(error).split(os.sep)[-1].split(":")[0])
        assert readable(out) in ((None, "running", "failed", "complete") if not done else ("complete",))
        if earlier and readable(out) == "complete" and not done:
            assert len(pd.read_parquet(out / "rows.parquet")) == 2
        assert not list(out.rglob("*.tmp"))
        parts = len(list(out.rglob("*.part")))
        assert computed(out) == ITEMS - parts
        number += 1
    assert {"manifest.json", "asked.json", "summary.json"} <= failed and sum("item" in name for name in failed) == ITEMS


def computed(out):
    """How many items the next run has to compute."""
    calls = []
    with records.run(out, command="small", arguments={"n": ITEMS}) as run:
        for index in range(ITEMS):
            run.keep(f"item {index}", lambda: calls.append(1))
    return len(calls)


class Full:
    """``open`` of a disk that is full at the n-th file that is written."""

    def __init__(self, number, real):
        self.left, self.real = number, real

    def __call__(self, file, mode="r", *more, **how):
        opened = self.real(file, mode, *more, **how)
        if "w" not in mode:
            return opened
        self.left -= 1
        if self.left != -1:
            return opened
        write = opened.write

        def some(data):
            write(data[:3])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return Writing(opened, some)


class Writing:
    """A file whose ``write`` is another one."""

    def __init__(self, file, write):
        self.file, self.write = file, write

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


@pytest.mark.parametrize("write", ["table", "figure", "json"])
def test_a_full_device(write, tmp_path):
    """What the libraries that write our files make of a device without room."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    values = {"table": pd.DataFrame({"a": range(9)}), "figure": figure, "json": {"a": 1}}
    name = {"table": "a.parquet", "figure": "a.png", "json": "a.json"}[write]
    (tmp_path / f".{name}.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(RecordError, match="No space left on device") as caught:
        getattr(records, f"write_{write}")(values[write], tmp_path / name)
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(quick, tmp_path, monkeypatch):
    from pathlib import Path

    real = Path.mkdir

    def refused(path, *how, **more):
        if path.name == ".kvprobe":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *how, **more)

    monkeypatch.setattr(Path, "mkdir", refused)
    status, _, said = command(words("sinks docs", quick, "--out", tmp_path / "out"))
    assert status == 2 and said == f"kvprobe: cannot write {tmp_path / 'out' / '.kvprobe'}: Permission denied\n"


def test_weights_that_are_no_numbers_are_refused(given, tmp_path):
    """A weight file that is whole and wrong: what it makes of every prompt is NaN."""
    import shutil

    from safetensors.torch import load_file, save_file

    from kvprobe import models
    from kvprobe.errors import ModelError

    folder = shutil.copytree(given["model"], tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        models.load(folder)
    assert "\n" not in str(caught.value)
    assert "copy" in str(caught.value) and json.dumps(str(caught.value))

"""Killed at any moment: the next run goes on, no row is lost or doubled, no half file is left."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from fault_runs import ITEMS, command, ended, forked, readable, results, silent, small_run, words

from kvprobe import cli, records


@pytest.fixture
def whole(quick, tmp_path):
    """Results and seconds of computing of a run that nobody disturbs."""
    given = words("sinks docs", quick, "--out", tmp_path / "whole")
    assert command(given)[0] == 0
    begun = time.process_time()
    assert command(given)[0] == 0
    return results(tmp_path / "whole"), time.process_time() - begun


def worked(child):
    """Seconds that a child has computed: other than the clock's they do not depend on who else is at work."""
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return 0.0 if fields[0] in "ZX" else sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_killed_at_ten_random_moments(quick, whole, tmp_path):
    expected, seconds = whole
    moments = random.Random(0)
    hit, resumed = 0, 0
    for number in range(10):
        out = tmp_path / f"out{number}"
        given = words("sinks docs", quick, "--out", out)
        child, moment = forked(silent(given)), seconds * moments.uniform(0.05, 1.0)
        while worked(child) < moment and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
        hit += ended(child) == -signal.SIGKILL
        kept = len(list(out.rglob("*.part")))
        status, _, said = command(given)
        assert status == 0 and (f"resuming: {kept} of 2 documents" in said if kept else not said)
        resumed += kept > 0
        assert results(out) == expected
        assert not list(out.rglob(".*")) and not list(out.rglob("*.tmp"))
    assert hit >= 5 and resumed >= 2  # else the moments were none of a run


def killed_at(step, out):
    """A small run that is killed right before its ``step``-th change of the disk."""

    def work():
        steps = iter(range(step))

        def counted(change):
            def count(*given, **more):
                if next(steps, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return change(*given, **more)

            return count

        for name in ("replace", "unlink", "mkdir", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        return small_run(out)

    return ended(forked(work))


@pytest.mark.slow
@pytest.mark.parametrize("earlier", [False, True], ids=["into an empty folder", "over complete results"])
def test_killed_before_every_single_change_of_the_disk(earlier, tmp_path, capsys, monkeypatch):
    for module in (records.asked, records.folder):
        monkeypatch.setattr(module, "versions", dict)  # looking them up takes longer than all the rest
    statuses, step, done = set(), 0, None
    while done != 0:
        out = tmp_path / str(step)
        if earlier:
            small_run(out, 2)
        done = killed_at(step, out)
        assert done in (0, -signal.SIGKILL)
        statuses.add(readable(out))
        small_run(out)
        assert readable(out) == "complete" and len(pd.read_parquet(out / "rows.parquet")) == ITEMS
        assert sorted(os.listdir(out)) == ["manifest.json", "rows.parquet", "summary.json"]
        step += 1
    assert step > 20 and {"running", "complete"} <= statuses and (None in statuses) != earlier


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_in_order(number, quick, whole, tmp_path, monkeypatch):
    from kvprobe.sinks import tables

    real, out = tables.probe_case, tmp_path / "out"

    def probe(model, settings, case):
        if case.index == 1:
            time.sleep(60)  # until the signal comes
        return real(model, settings, case)

    given = words("sinks docs", quick, "--out", out)
    monkeypatch.setattr(tables, "probe_case", probe)
    with open(tmp_path / "said", "w") as said:

        def work():
            sys.stderr = said
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return cli.main(given)

        child = forked(work)
        while not list(out.rglob("*.part")):
            time.sleep(0.02)
        os.kill(child, number)
        assert ended(child) == 128 + number
    monkeypatch.setattr(tables, "probe_case", real)
    lines = (tmp_path / "said").read_text().splitlines()
    assert f"1 finished parts are in {out}: the same command goes on from there" in lines[0]
    assert lines[1:] == ([] if number == signal.SIGTERM else ["kvprobe: interrupted"])
    assert json.loads((out / "manifest.json").read_text())["status"] == "interrupted"
    status, _, told = command(given)
    assert status == 0 and "resuming: 1 of 2 documents" in told and results(out) == whole[0]


def test_sigterm_is_left_alone_where_somebody_else_uses_it(tmp_path):
    mine = signal.signal(signal.SIGTERM, lambda *given: None)
    try:
        theirs = signal.getsignal(signal.SIGTERM)
        with records.run(tmp_path / "a", command="small", arguments={}):
            assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, mine)
    with records.run(tmp_path / "b", command="small", arguments={}):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_run_into_a_folder_is_refused_and_changes_nothing(quick, tmp_path):
    out = tmp_path / "out"
    with records.run(out, command="small", arguments={}) as run:
        run.keep("item 0", lambda: 1)
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        for _ in range(2):
            status, _, said = command(words("sinks docs", quick, "--out", out))
            assert status == 2 and said.count("\n") == 1
            assert f"another run is writing to {out}: wait until it has ended, or give another folder" in said
        assert ended(forked(silent(words("sinks docs", quick, "--out", out)))) == 2  # from another process
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
        run.json({}, "done.json")
    assert sorted(os.listdir(out)) == ["done.json", "manifest.json"]


def test_a_killed_run_leaves_its_folder_to_the_next(tmp_path):
    def work():
        with records.run(tmp_path / "out", command="small", arguments={}):
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(forked(work)) == -signal.SIGKILL
    with records.run(tmp_path / "out", command="small", arguments={}) as run:
        run.json({}, "done.json")
    assert sorted(os.listdir(tmp_path / "out")) == ["done.json", "manifest.json"]


@pytest.mark.slow
def test_a_real_process_is_terminated_and_gone_on_with(given, tmp_path):
    out = tmp_path / "out"
    asked = words("sinks docs", given, "--out", out)
    process = subprocess.Popen([sys.executable, "-m", "kvprobe", *asked], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(out.rglob("*.part")):
        time.sleep(0.02)
    process.terminate()
    said = process.communicate()[1]
    assert process.returncode == 143 and said.count("\n") == 1 and "the same command goes on" in said, said
    assert json.loads((out / "manifest.json").read_text())["status"] == "interrupted"
    status, _, said = command(asked)
    assert status == 0 and "of 2 documents found" in said and not list(out.rglob(".*"))

"""Every experiment as a command on a tiny model, in a second or less."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import placebo_items

from kvprobe import cli, records

TEXT = "The heron stood in the reeds and watched a slow grey river turn under the bridge. "
SEED = ["--seed", "4"]
TASK = ["--items", "2", "--new-tokens", "1"]
COMMANDS = {
    "niah": ["niah", *TASK, "--length", "900", "--task", "niah_single_1", "--distractors", "2", "--decoys", "0"],
    "evict": ["evict", *TASK, "--length", "900", "--policies", "streaming,snapkv+two_stage,random", "--cache", "0.5"],
    "sinks": ["sinks", "--items", "2", "--length", "900", "--distractors", "2", "--epsilons", "0,1e-3"],
    "sinks docs": ["sinks", "--docs", "{docs}", "--documents", "2", "--length", "150", "--epsilons", "0"],
    "placebo": ["placebo", "--file", "{items}", "--placebos", "2", "--inject", "always"],
    "placebo traces": [
        "placebo",
        "--file",
        "{traces}",
        "--task",
        "trace_memory",
        "--placebos",
        "2",
        "--caliper",
        "0.6",
    ],
    "map": ["map", "--docs", "{docs}", "--cache", "0.5", "--budgets", "0.6", "--length", "240"],
    "audit": ["audit", "--docs", "{docs}", "--cache", "0.5", "--length", "240", "--base", "snapkv", "--sweep", "norm"],
    "heads": ["heads", "--lengths", "900", "--depths", "0,100", "--seeds", "1", "--items", "2", "--draws", "2"],
}
MORE = {
    "audit": ["--sweep-cache", "0.5", "--items", "1", "--task", "niah_single_1"],
    "heads": ["--top", "3", "--new-tokens", "4", "--reasoning-task", "none", "--knockouts"],
}


def words(name: str, given: dict[str, Path], *more: object) -> list[str]:
    """The command line of one experiment."""
    asked = [word.format(**given) for word in (*COMMANDS[name], *MORE.get(name, ()))]
    return [*asked, *SEED, "--model", str(given["model"]), *map(str, more)]


def inputs(folder: Path) -> dict[str, Path]:
    """A tiny model, documents, items and traces, all in one folder."""
    import tiny

    docs = folder / "docs"
    docs.mkdir(parents=True)
    for number in range(2):
        (docs / f"text{number}.txt").write_text((TEXT[number:] + TEXT[::-1]) * 2)
    return {
        "model": tiny.save("llama", folder / "tiny", max_position_embeddings=2048),
        "docs": docs,
        "items": placebo_items.written(folder / "items.jsonl", *(placebo_items.item_row(i) for i in range(3))),
        "traces": placebo_items.written(folder / "traces.jsonl", *(placebo_items.trace_row(i) for i in range(2))),
    }


def command(given: list[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one command, in this process."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        status = cli.main(given)
    return status, said.getvalue(), complained.getvalue()


def results(out: Path) -> dict[str, object]:
    """Everything in a run folder that does not say how long it took: every table, every JSON, every figure's bytes."""
    found: dict[str, object] = {}
    for path in sorted(each for each in out.rglob("*") if each.is_file()):
        name = path.relative_to(out).as_posix()
        if path.suffix == ".parquet":
            table = pd.read_parquet(path)
            timed = [column for column in table.columns if column.endswith("_s") or column == "seconds"]
            found[name] = table.drop(columns=timed).to_parquet()
        elif path.suffix == ".json":
            found[name] = timeless(json.loads(path.read_text()), out)
        else:
            found[name] = path.read_bytes()
    return found


TIMED = ("started", "elapsed_s", "peak_rss_mib", "timings_s", "out", "json", "profile")


def timeless(value: object, out: Path) -> object:
    """JSON without times and places."""
    if isinstance(value, dict):
        return {key: timeless(each, out) for key, each in value.items() if key not in TIMED}
    return [timeless(each, out) for each in value] if isinstance(value, list) else value


def forked(work: Callable[[], int]) -> int:
    """The process number of a child that does ``work`` and ends with what it returns."""
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        status = work()
    except SystemExit as stop:
        status = stop.code
    finally:
        sys.stderr.flush()
        os._exit(status)


def ended(child: int) -> int:
    """Wait for a child: its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def silent(given: list[str]) -> Callable[[], int]:
    """A command as a child's work."""

    def work() -> int:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        return cli.main(given)

    return work


ITEMS = 3


def small_run(out: Path, n: int = ITEMS) -> int:
    """A run of a few parts, a table and a JSON file, without a model."""
    with records.run(out, command="small", arguments={"n": n}) as run:
        rows = [
            run.keep(f"item {index}", lambda index=index: {"item": index, "square": index**2}) for index in range(n)
        ]
        run.resuming(n, "items")
        run.table(pd.DataFrame(rows), "rows.parquet")
        run.json({"n": n}, "summary.json")
    return 0


def readable(out: Path) -> str | None:
    """What a reader sees: a manifest that is whole, and if it says complete, exactly the files that it names."""
    if not (out / "manifest.json").exists():
        return None
    told = json.loads((out / "manifest.json").read_text())
    if told["status"] == "complete":
        n = told["arguments"]["n"]
        assert told["outputs"] == ["rows.parquet", "summary.json"]
        assert pd.read_parquet(out / "rows.parquet")["item"].tolist() == list(range(n))
        assert json.loads((out / "summary.json").read_text()) == {"n": n}
    return told["status"]

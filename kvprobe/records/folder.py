"""An open run folder: its manifest, its files, and how it is left, whatever happens."""

from __future__ import annotations

import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.errors import RecordError
from kvprobe.parts import HIDDEN, Unfinished, replacing
from kvprobe.parts.store import say
from kvprobe.records.asked import asked
from kvprobe.records.manifests import MANIFEST, SCHEMA, manifest_of, own_files
from kvprobe.records.writing import peak_rss_mib, to_json, write_figure, write_json, write_table
from kvprobe.versions import versions

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

TERMINATED = 128 + signal.SIGTERM


class Run:
    """An open run folder; made by :func:`run`.

    Attributes
    ----------
    path
        The folder.
    keep
        Wraps what is costly and stands alone: ``run.keep("item 3", lambda: …)`` (see :mod:`kvprobe.parts`).
    resumed
        Whether a run that asked the same has left parts here.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], unfinished: Unfinished, resumed: bool = False) -> None:
        self.path, self.resumed, self.keep = path, resumed, unfinished.parts
        self._manifest, self._unfinished = manifest, unfinished
        self._begun = time.perf_counter()
        before = manifest_of(path) or {}
        self._stale = own_files(before)
        whole = before.get("status") == "complete"
        self._earlier = {key: value for key, value in before.items() if key != "later"} if whole else None
        self._outputs: list[str] = []
        self._write_manifest("running")

    def table(self, df: pd.DataFrame, name: str) -> Path:
        """Write `df` to ``name`` (ends in ``.parquet``)."""
        return self._add(name, lambda path: write_table(df, path))

    def figure(self, figure: Figure, name: str, dpi: int = 150) -> Path:
        """Write `figure` to ``name`` (ends in ``.png``, ``.svg`` or ``.pdf``)."""
        return self._add(name, lambda path: write_figure(figure, path, dpi))

    def json(self, value: Any, name: str) -> Path:
        """Write `value` to ``name`` as JSON."""
        return self._add(name, lambda path: write_json(value, path))

    def update(self, **facts: Any) -> None:
        """Add facts learnt on the way to the manifest, for example the weight-processing state of a loaded model."""
        self._manifest |= facts
        self._write_manifest("running")

    def resuming(self, total: int, unit: str) -> None:
        """Say once how many of all ``items``, ``documents`` … an earlier run has left; nothing if there was none."""
        if self.resumed:
            found = self.keep.count(unit.removesuffix("s"))
            say(f"resuming: {found} of {total} {unit} found in {self.path}")
        self.resumed = False

    def complete(self) -> None:
        """Put everything in its place; at no time does a manifest say complete of files that are not its own."""
        if self._earlier is not None:
            self._earlier = None
            self._write_manifest("running")
            for name in self._outputs:
                self._publish(name)
        for name in self._stale - set(self._outputs):
            (self.path / name).unlink(missing_ok=True)
        self._write_manifest("complete")

    def fail(self, error: BaseException) -> None:
        """Say in the manifest how the run ended; what is finished is kept."""
        stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        self._manifest["error"] = f"{type(error).__name__}: {error}{notes}"
        with suppress(RecordError):  # of a full disk: what could not be written first is the better message
            self._write_manifest("interrupted" if stopped else "failed")
        if stopped:
            kept = self.keep.count()
            more = f"; {kept} finished parts are in {self.path}: the same command goes on from there" if kept else ""
            say(f"{'terminated' if isinstance(error, SystemExit) else 'stopped'}{more}")

    def _add(self, name: str, write: Callable[[Path], Any]) -> Path:
        """A new file waits out of sight as long as an earlier run's stands in its place."""
        write(self._unfinished.new / name)
        self._outputs.append(name)
        if self._earlier is None:
            self._publish(name)
        self._write_manifest("running")
        return self.path / name

    def _publish(self, name: str) -> None:
        try:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(self._unfinished.new / name, self.path / name)
        except OSError as error:
            raise RecordError(f"cannot write {self.path / name}: {error.strerror or error}") from error

    def _write_manifest(self, status: str) -> None:
        # Half-way between two runs a folder owns the files of both: were this one killed, the next still knows them.
        stale = sorted(self._stale - set(self._outputs)) if status != "complete" else []
        cost = {"elapsed_s": round(time.perf_counter() - self._begun, 3), "peak_rss_mib": round(peak_rss_mib(), 1)}
        mine = self._manifest | {"status": status} | cost | {"outputs": sorted(self._outputs)}
        if self._earlier is not None:
            mine = self._earlier | {"later": mine | {"outputs_in": f"{HIDDEN}/{self._unfinished.new.name}"}}
        elif stale:
            mine |= {"earlier_outputs": stale}
        with replacing(self.path / MANIFEST, self._unfinished.scratch) as temporary:
            temporary.write_text(to_json(mine, indent=2) + "\n", encoding="utf-8")


@contextmanager
def run(
    path: str | Path,
    *,
    command: str,
    arguments: Mapping[str, Any],
    seed: int | None = None,
    model: str | None = None,
    weight_processing: str | None = None,
    identity: Mapping[str, Any] | None = None,
) -> Iterator[Run]:
    """Open `path` as the folder of one run; close it with the status that the block ends in.

    Parameters
    ----------
    path
        A folder that is absent, empty, or of an earlier kvprobe run (which is replaced when this one is complete).
    command, arguments, seed
        What was asked, in full: enough to ask it again.
    model, weight_processing
        The model's name and whether its weights are raw or folded; :meth:`Run.update` adds what is known later.
    identity
        What tells this model from another of its name: parts are used again only where this is the same.

    Raises
    ------
    RecordError
        If `path` is a file, holds files of something else, is being written by another run, or cannot be written.

    Notes
    -----
    In the main thread SIGTERM ends the block like Ctrl-C does, with ``SystemExit(143)``.
    """
    folder = _claim(Path(path))
    unfinished = Unfinished(folder)
    complete = False
    try:
        resumed = unfinished.resume(asked(command, arguments, seed, model, identity or {}))
        about = {"command": command, "arguments": dict(arguments), "seed": seed, "model": model}
        about |= {"weight_processing": weight_processing} | _surroundings()
        with _terminable():
            opened = Run(folder, {"schema": SCHEMA} | about, unfinished, resumed)
            try:
                yield opened
                opened.complete()
                complete = True
            except BaseException as error:
                opened.fail(error)
                raise
    finally:
        if complete:
            unfinished.drop()
        else:
            unfinished.leave()


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM as an exception, where nobody else has a use for it; a second one does not disturb the first."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(TERMINATED)


def _surroundings() -> dict[str, Any]:
    machine = {"system": platform.system(), "machine": platform.machine(), "cpus": os.cpu_count()}
    return {"started": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions(), "platform": machine}


def _claim(path: Path) -> Path:
    """Make the folder, or take one that is empty or of an earlier run."""
    if path.exists() and not path.is_dir():
        raise RecordError(f"--out {path} is a file; give a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        others = {each.name for each in path.iterdir()} - {HIDDEN}
    except OSError as error:
        raise RecordError(f"cannot make the folder {path}: {error.strerror}") from error
    if others and manifest_of(path) is None:
        raise RecordError(f"{path} holds files that are not of a kvprobe run; give a new or an empty folder")
    return path

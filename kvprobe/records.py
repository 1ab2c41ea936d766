"""Run folders: what a command was asked, what it found, and what it ran on.

Every file is written beside its place and then renamed, so that a reader sees a whole file or none. ``manifest.json``
says ``running`` until the run is over, then ``complete`` or ``failed``; only a folder that has one is written into
again.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe.errors import RecordError
from kvprobe.versions import versions

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MANIFEST = "manifest.json"
SCHEMA = "kvprobe-run/1"
# Without the date and version that matplotlib writes by itself, the same figure is the same bytes.
_ANONYMOUS: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None},
    ".svg": {"Date": None},
}


class Run:
    """An open run folder; made by :func:`run`."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self._manifest = manifest
        self._begun = time.perf_counter()
        self._stale = _own_files(path)
        self._outputs: list[str] = []
        self._write_manifest("running")

    def table(self, df: pd.DataFrame, name: str) -> Path:
        """Write `df` to ``name`` (ends in ``.parquet``)."""
        return self._keep(write_table(df, self.path / name))

    def figure(self, figure: Figure, name: str, dpi: int = 150) -> Path:
        """Write `figure` to ``name`` (ends in ``.png``, ``.svg`` or ``.pdf``)."""
        return self._keep(write_figure(figure, self.path / name, dpi))

    def json(self, value: Any, name: str) -> Path:
        """Write `value` to ``name`` as JSON."""
        return self._keep(write_json(value, self.path / name))

    def update(self, **facts: Any) -> None:
        """Add facts learnt on the way to the manifest, for example the weight-processing state of a loaded model."""
        self._manifest |= facts
        self._write_manifest("running")

    def close(self, error: BaseException | None = None) -> None:
        """Write the final manifest; if all went well, remove what an earlier run left and this one did not write."""
        if error is not None:
            self._manifest["error"] = f"{type(error).__name__}: {error}"
        else:
            for name in self._stale - set(self._outputs):
                (self.path / name).unlink(missing_ok=True)
        self._write_manifest("complete" if error is None else "failed")

    def _keep(self, path: Path) -> Path:
        self._outputs.append(path.relative_to(self.path).as_posix())
        self._write_manifest("running")
        return path

    def _write_manifest(self, status: str) -> None:
        # Half-way between two runs a folder owns the files of both: were this one killed, the next still knows them.
        earlier = sorted(self._stale - set(self._outputs)) if status != "complete" else []
        cost = {"elapsed_s": round(time.perf_counter() - self._begun, 3), "peak_rss_mib": round(peak_rss_mib(), 1)}
        files = {"outputs": sorted(self._outputs)} | ({"earlier_outputs": earlier} if earlier else {})
        write_json(self._manifest | {"status": status} | cost | files, self.path / MANIFEST)


@contextmanager
def run(
    path: str | Path,
    *,
    command: str,
    arguments: Mapping[str, Any],
    seed: int | None = None,
    model: str | None = None,
    weight_processing: str | None = None,
) -> Iterator[Run]:
    """Open `path` as the folder of one run; close it with the status that the block ends in.

    Parameters
    ----------
    path
        A folder that is absent, empty, or of an earlier kvprobe run (which is then replaced file by file).
    command, arguments, seed
        What was asked, in full: enough to ask it again.
    model, weight_processing
        The model's name and whether its weights are raw or folded; :meth:`Run.update` adds what is known later.

    Raises
    ------
    RecordError
        If `path` is a file, holds files of something else, or cannot be written.
    """
    folder = _claim(Path(path))
    asked = {"command": command, "arguments": dict(arguments), "seed": seed}
    about = {"model": model, "weight_processing": weight_processing}
    opened = Run(folder, {"schema": SCHEMA} | asked | about | _surroundings())
    try:
        yield opened
    except BaseException as error:
        opened.close(error)
        raise
    opened.close()


def write_table(df: pd.DataFrame, path: str | Path) -> Path:
    """Write `df` as parquet, without its index; raise :class:`RecordError` if that cannot be done."""
    with _replacing(Path(path), (".parquet",)) as temporary:
        df.to_parquet(temporary, index=False)
    return Path(path)


def write_figure(figure: Figure, path: str | Path, dpi: int = 150) -> Path:
    """Write `figure` as PNG, SVG or PDF by the ending of `path`; the same figure gives the same bytes."""
    kind = Path(path).suffix
    with _replacing(Path(path), tuple(_ANONYMOUS)) as temporary:
        metadata = _ANONYMOUS[kind]
        figure.savefig(temporary, dpi=dpi, format=kind[1:], bbox_inches="tight", metadata=metadata)
    return Path(path)


def write_json(value: Any, path: str | Path) -> Path:
    """Write `value` as indented JSON (see :func:`to_json`)."""
    return write_text(to_json(value, indent=2) + "\n", path, ".json")


def write_text(text: str, path: str | Path, ending: str = ".txt") -> Path:
    """Write `text` in UTF-8 to a `path` of this ending."""
    with _replacing(Path(path), (ending,)) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return standard JSON: arrays and tensors become lists, paths strings, NaN and infinities ``null``."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def peak_rss_mib() -> float:
    """Return the largest resident memory of this process so far, in MiB (NaN where the system does not tell).

    On Linux from ``VmHWM``: what ``getrusage`` says there includes the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024  # given in KiB
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)  # given in bytes
    return math.nan


def _surroundings() -> dict[str, Any]:
    machine = {"system": platform.system(), "machine": platform.machine(), "cpus": os.cpu_count()}
    return {"started": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions(), "platform": machine}


def _claim(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise RecordError(f"--out {path} is a file; give a folder")
    if path.is_dir() and any(path.iterdir()) and _manifest_of(path) is None:
        raise RecordError(f"{path} holds files that are not of a kvprobe run; give a new or an empty folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"cannot make the folder {path}: {error.strerror}") from error
    return path


def _manifest_of(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(manifest, dict) and str(manifest.get("schema", "")).startswith("kvprobe-run/")
    return manifest if ours else None


def _own_files(path: Path) -> set[str]:
    """Return the names that an earlier run wrote; one that leads out of the folder is not ours to remove."""
    manifest = _manifest_of(path) or {}
    names = [*manifest.get("outputs", []), *manifest.get("earlier_outputs", [])]
    return {name for name in names if not Path(name).is_absolute() and ".." not in Path(name).parts}


@contextmanager
def _replacing(path: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """Yield a temporary sibling of `path` that becomes `path` if the block succeeds and is removed if it does not."""
    if path.suffix not in endings:
        raise RecordError(f"{path.name} must end in {' or '.join(endings)}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # it is gone after a success, and its folder may be what could not be made
            temporary.unlink()


def _plain(value: Any) -> Any:
    """Return `value` in the types of JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors, pandas columns
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value

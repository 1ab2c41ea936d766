"""Whole files or none, and a mark of what a file or folder holds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvprobe.errors import RecordError

READ_BYTES = 64 << 20
"""Files up to this size are marked by what they hold; larger ones, and those in folders, by size and time."""


@contextmanager
def replacing(path: Path, scratch: Path | None = None) -> Iterator[Path]:
    """Yield a temporary file that becomes `path` if the block succeeds and is removed if it does not.

    Parameters
    ----------
    scratch
        The folder of the temporary file, on the same file system; None: the folder of `path`.

    Raises
    ------
    RecordError
        If the system refuses to write, naming `path` and the reason.
    """
    folder = path.parent if scratch is None else scratch
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # it is gone after a success, and its folder may be what could not be made
            temporary.unlink()


def mark(path: Path) -> str | None:
    """What tells a file or folder from another version of itself: equal marks, equal content; None if there is none."""
    try:
        if path.is_dir():
            return _of_folder(path)
        return _of_bytes(path) if path.stat().st_size <= READ_BYTES else _stamp(path)
    except OSError:
        return None


def _of_folder(path: Path) -> str:
    """By the names, sizes and times of all files: quick, and never the same after a change that anyone makes."""
    files = sorted(each for each in path.rglob("*") if each.is_file())
    lines = "\n".join(f"{each.relative_to(path).as_posix()} {_stamp(each)}" for each in files)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def _of_bytes(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"

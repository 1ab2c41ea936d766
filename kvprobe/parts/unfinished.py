"""The hidden folder of a run that is not finished: its lock, what was asked, its parts, and files not yet in place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvprobe.errors import RecordError
from kvprobe.parts.files import replacing
from kvprobe.parts.store import Parts, say

HIDDEN = ".kvprobe"
ASKED, LOCK = "asked.json", "lock"


class Unfinished:
    """``OUT/.kvprobe``, opened by one process at a time.

    Attributes
    ----------
    parts
        What is computed already, and what will be.
    new
        Where finished files wait that may not yet stand beside an earlier run's.
    """

    def __init__(self, out: Path) -> None:
        from filelock import FileLock, Timeout

        self.out, self.folder = out, out / HIDDEN
        self.new, self.scratch = self.folder / "new", self.folder / "scratch"
        self.parts = Parts(self.folder / "parts", self.scratch)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.folder / LOCK)
            self._lock.acquire(blocking=False)
        except Timeout:
            raise RecordError(
                f"another run is writing to {out}: wait until it has ended, or give another folder"
            ) from None
        except OSError as error:
            raise RecordError(f"cannot write {self.folder}: {error.strerror or error}") from error

    def resume(self, asked: Mapping[str, Any]) -> bool:
        """Keep the parts if they are of a run that asked the same, else drop them, saying why; note what is asked."""
        told = json.loads(json.dumps(asked, sort_keys=True, default=str))
        before = self._before()
        same = before == told
        if not same and self.parts.count():
            differ = ", ".join(_differences(before, told)) or ASKED
            say(f"{self.out} has {self.parts.count()} parts of a run that differs in {differ}: they are not used")
        for each in (self.new, self.scratch, *(() if same else (self.parts.folder,))):
            _remove(each)
        self._write_asked(told)
        return same and self.parts.count() > 0

    def drop(self) -> None:
        """The run is complete, or left nothing worth keeping: nothing of this folder stays."""
        for each in self.folder.iterdir() if self.folder.is_dir() else ():
            if each.name != LOCK:
                _remove(each)
        lock = self.folder / LOCK
        with suppress(OSError):  # while it is held: nobody can take a file that is about to go
            lock.unlink()
        there = lock.exists()  # where open files cannot be removed
        self._lock.release()
        with suppress(OSError):
            if there:
                lock.unlink()
            self.folder.rmdir()

    def leave(self) -> None:
        """The run was ended: what is finished stays for the next one, everything else goes."""
        if not self.parts.count() and not any(each.is_file() for each in self.new.rglob("*")):
            self.drop()
            return
        _remove(self.scratch)
        self._lock.release()

    def _before(self) -> Any:
        try:
            return json.loads((self.folder / ASKED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _write_asked(self, told: Any) -> None:
        with replacing(self.folder / ASKED, self.scratch) as temporary:
            temporary.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Names of what two nested records differ in."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now and name:
        yield name


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()

"""keep(name, compute): a result from its file if an earlier run has left it, else computed, and written first."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from kvprobe.errors import KVProbeError
from kvprobe.parts.codec import Damaged, Unstorable, dumps, loads
from kvprobe.parts.files import replacing

T = TypeVar("T")
ENDING = ".part"
LONGEST = 60
_NAMED = "_names_its_item"


class Keep(Protocol):
    """What an experiment calls for everything that is costly and stands alone."""

    def __call__(self, name: str, compute: Callable[[], T], /) -> T:
        """Return what ``compute`` returns, now or in the run before; a name is used once a run."""


def afresh(name: str, compute: Callable[[], T]) -> T:
    """Keep nothing: compute. A mistake that is found on the way is told with the name of the item."""
    with _naming(name):
        return compute()


def under(keep: Keep, prefix: str) -> Keep:
    """The same keeper, its names behind ``prefix``."""

    def inner(name: str, compute: Callable[[], T], /) -> T:
        return keep(f"{prefix}: {name}", compute)

    return inner


def say(line: str) -> None:
    """One line on stderr."""
    print("kvprobe:", " ".join(line.split()), file=sys.stderr, flush=True)


class Parts:
    """One file a result in a folder; called like :func:`afresh`.

    A run sees only what can be read back from a file, also the first time: then one that was ended and goes on cannot
    differ from one that was not.
    """

    def __init__(self, folder: Path, scratch: Path | None = None) -> None:
        self.folder = folder
        self._scratch, self._names = scratch, set[str]()

    def __call__(self, name: str, compute: Callable[[], T], /) -> T:
        """See :class:`Keep`.

        Raises
        ------
        RecordError
            The part cannot be written; those before it stay.
        """
        assert name not in self._names, f"two parts are called {name!r}"
        self._names.add(name)
        path = self.folder / file_name(name)
        try:
            found: T = loads(path.read_bytes(), name)
            return found
        except FileNotFoundError:
            pass
        except (OSError, Damaged) as error:
            say(f"{path} is damaged ({error}): {name} is computed again")
        value = afresh(name, compute)
        try:
            data = dumps(name, value)
            found = loads(data, name)
        except (Unstorable, Damaged) as error:
            say(f"{name} holds {error}, which cannot be kept: after an interruption it is computed again")
            return value
        with replacing(path, self._scratch) as temporary:
            temporary.write_bytes(data)
        return found

    def count(self, word: str = "") -> int:
        """Number of parts that there are, of those whose name is ``word`` and a number if one is given."""
        pattern = f"{word}-[0-9]*-????????????{ENDING}" if word else f"*{ENDING}"
        return sum(1 for _ in self.folder.glob(pattern))


def file_name(name: str) -> str:
    """A readable file name that no two names share."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[:LONGEST]
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:12]}{ENDING}"


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the item's name before the message of a mistake, once; into the notes of anything else."""
    try:
        yield
    except KVProbeError as error:
        if not getattr(error, _NAMED, False):
            error.args = (f"{name}: {error}",)
            setattr(error, _NAMED, True)
        raise
    except Exception as error:
        error.add_note(f"in {name}")
        raise

"""JSON lines of the user's own: every fault is one line that names file, line, field, what was given and allowed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprobe.errors import DataError, PromptError, TaskError, quote
from kvprobe.prompts import alignment
from kvprobe.prompts.alignment import Range

_SPAN = "a text that occurs exactly once, or a pair [start, stop] of characters"


@dataclass(frozen=True)
class Line:
    """One object of a JSON lines file.

    Attributes
    ----------
    where : str
        What messages call it.
    name : str
        The object's ``id``, or the file's name without its ending and the line's number.
    number : int
        The line's number, from 1.
    row : dict
        The object.
    """

    where: str
    name: str
    number: int
    row: dict[str, Any]

    def refuse(self, field: str, allowed: str) -> DataError:
        """The error for a field that is missing or not what it must be."""
        given = f"is {quote(self.row[field])}" if field in self.row else "is missing"
        return DataError(f"{self.where}: {field} {given}, must be {allowed}")

    def text(self, field: str) -> str:
        """A text that is not blank."""
        value = self.row.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.refuse(field, "a text that is not empty")
        return value

    def spans(self, field: str, text: str, least: int = 0) -> list[Range]:
        """Character ranges: one span, or a list of them."""
        if field not in self.row and not least:
            return []
        value = self.row.get(field)
        given = value if isinstance(value, list) and not _is_pair(value) else [value]
        if len(given) < least or not all(isinstance(one, str) or _is_pair(one) for one in given):
            raise self.refuse(field, f"{_SPAN}; or a list of those{', not empty' if least else ''}")
        with self.naming(field):
            return [alignment.resolve(text, one, field) for one in given]

    def ranges(self, field: str, text: str, size: int, meaning: str) -> list[tuple[int, ...]]:
        """A list of character pairs, each with so many whole numbers in all."""
        value = self.row.get(field, [])
        wanted = f"a list of {meaning}"
        if not isinstance(value, list) or not all(_is_numbers(one, size) for one in value):
            raise self.refuse(field, f"{wanted}, all whole numbers")
        with self.naming(field):
            return [(*alignment.bounds(one[:2], len(text), field, "characters"), *one[2:]) for one in value]

    @contextmanager
    def naming(self, field: str = "") -> Iterator[None]:
        """Errors of other parts, named after this line."""
        try:
            yield
        except (PromptError, TaskError) as error:
            raise DataError(f"{self.where}: {f'{field}: ' if field else ''}{error}") from None


def read(path: str | os.PathLike[str], known: Sequence[str]) -> list[Line]:
    """All objects of a file; blank lines are skipped.

    Parameters
    ----------
    path
        A UTF-8 file with one JSON object a line.
    known
        The fields an object may have.

    Raises
    ------
    TaskError
        If ``path`` is no path.
    DataError
        For a file that cannot be read, is not UTF-8 or has no object; a line that is no JSON object; a field that is
        not known or given twice; an ``id`` that is not a text or whole number, or that two lines share.
    """
    if not isinstance(path, str | os.PathLike):
        raise TaskError(f"path is {quote(path)}, must be the path of a file of JSON lines")
    place = os.path.expanduser(os.fspath(path))
    lines = enumerate(_content(place).split("\n"), 1)  # not splitlines(): a JSON string may hold U+2028 as it is
    found = [_line(text, f"{place!r}, line {i}", f"{Path(place).stem}-{i}", i) for i, text in lines if text.strip()]
    if not found:
        raise DataError(f"{place!r} is empty, must hold at least one JSON object a line")
    seen: dict[str, int] = {}
    for line in found:
        if unknown := sorted(set(line.row) - set(known)):
            raise DataError(f"{line.where}: unknown field {quote(unknown[0])}, allowed are {', '.join(known)}")
        if line.name in seen:
            raise DataError(f"{line.where}: id {quote(line.name)} is that of line {seen[line.name]}, must be its own")
        seen[line.name] = line.number
    return found


def _content(place: str) -> str:
    try:
        return Path(place).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot read {place!r}: {error.strerror or error}; must be a file of JSON lines") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{place!r}, line {line}: is not UTF-8 ({error.reason}), must be UTF-8 text") from None
    except ValueError as error:  # a path with a zero byte
        raise DataError(f"cannot read {place!r}: {error}; must be a file of JSON lines") from None


def _line(text: str, where: str, name: str, number: int) -> Line:
    try:
        row = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not JSON ({error}), must be one object a line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: is {quote(row)}, must be a JSON object")
    line = Line(where, name, number, row)
    if "id" in row and (isinstance(row["id"], bool) or not isinstance(row["id"], str | int) or row["id"] == ""):
        raise line.refuse("id", "a text or a whole number")
    return Line(where, str(row.get("id", name)), number, row)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, refused where a field stands in it twice: the first would be lost."""
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the field {quote(twice)} stands there twice")
    return dict(pairs)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    """A number, refused where it is too large for one: the infinity that it would become is no JSON."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{quote(digits)} is too large a number")
    return value


def _is_numbers(value: Any, size: int) -> bool:
    """Whether a value is a list of so many whole numbers."""
    whole = isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    return whole and len(value) == size


def _is_pair(value: Any) -> bool:
    return _is_numbers(value, 2)

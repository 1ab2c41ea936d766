"""Key sets: what an arm of a placebo experiment cuts out of the cache, as sorted, disjoint, half-open token spans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvprobe.errors import PromptError, quote
from kvprobe.spans import check_spans

Span = tuple[int, int]
KeySet = tuple[Span, ...]


def key_set(given: Any, n: int, name: str = "target", spans: Mapping[str, Span] | None = None) -> KeySet:
    """The key set that ``given`` means.

    Parameters
    ----------
    given
        One span ``(start, stop)``, several, or names of ``spans``. Positions count left pads, as a trace does.
    n
        Number of keys.
    name
        What the set is, for messages.
    spans
        Named spans that may be asked for, those of a trace.

    Returns
    -------
    tuple of (int, int)
        Sorted.

    Raises
    ------
    PromptError
        Nothing given, a span that is empty or not within [0, n), an unknown name, or spans that overlap.
    """
    items = [given] if isinstance(given, str) or _bare(given) else given
    if not isinstance(items, Iterable):
        raise PromptError(f"{name} is {quote(given)}; allowed: (start, stop), or a list of such spans")
    found = check_spans([_named(item, name, spans or {}) for item in items], n)
    ordered = tuple(sorted(found))
    for (_, stop), (start, _) in pairwise(ordered):
        if start < stop:
            raise PromptError(f"{name} is {quote(given)}, whose spans overlap at {start}; allowed: disjoint spans")
    return ordered


def span_list(given: Any, n: int, name: str, spans: Mapping[str, Span] | None = None) -> list[Span]:
    """Spans that may be none and may overlap (``protect``, ``hard``, ``boundaries``), sorted, each once."""
    if given is None:
        return []
    items = [given] if isinstance(given, str) or _bare(given) else given
    if not isinstance(items, Iterable):
        raise PromptError(f"{name} is {quote(given)}; allowed: a list of (start, stop)")
    found = [_named(item, name, spans or {}) for item in items]
    return sorted(set(check_spans(found, n))) if found else []


def size(keys: KeySet) -> int:
    """Number of tokens."""
    return sum(stop - start for start, stop in keys)


def positions(keys: KeySet) -> list[int]:
    """Every key of the set, in order."""
    return [at for start, stop in keys for at in range(start, stop)]


def centre(keys: KeySet) -> float:
    """Mean position of the keys."""
    return sum((start + stop - 1) / 2 * (stop - start) for start, stop in keys) / size(keys)


def overlap(one: KeySet, other: KeySet) -> bool:
    """Do the sets share a key?"""
    return any(a < d and c < b for a, b in one for c, d in other)


def jaccard(one: KeySet, other: KeySet) -> float:
    """Shared keys over all keys of the two sets."""
    shared = sum(max(0, min(b, d) - max(a, c)) for a, b in one for c, d in other)
    return shared / (size(one) + size(other) - shared)


def union(keys: Iterable[int]) -> KeySet:
    """Single positions as the fewest spans."""
    spans: list[Span] = []
    for at in sorted(keys):
        if spans and spans[-1][1] == at:
            spans[-1] = (spans[-1][0], at + 1)
        else:
            spans.append((at, at + 1))
    return tuple(spans)


def text(keys: KeySet) -> str:
    """A set as tables and messages show it, ``10:14 20:22``."""
    return " ".join(f"{start}:{stop}" for start, stop in keys)


def _named(item: Any, name: str, spans: Mapping[str, Span]) -> Any:
    if not isinstance(item, str):
        return item
    if item not in spans:
        raise PromptError(f"{name}: the trace has no span {item!r}; it has {', '.join(sorted(spans)) or 'none'}")
    return spans[item]


def _bare(given: Any) -> bool:
    return isinstance(given, Sequence) and len(given) == 2 and all(hasattr(value, "__index__") for value in given)

"""Where placebos may come from: windows, labelled hard spans and their unions, token sets; and how they are chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from kvprobe.errors import InterventionError, PromptError, quote
from kvprobe.placebo.keysets import KeySet, Span, jaccard, key_set, overlap, size, span_list

LARGEST_UNION = 5
MOST_UNIONS = 1024
SIMILAR = 0.5


@dataclass(frozen=True)
class Room:
    """Where a placebo may lie: keys in [first, stop) outside ``taken``, the target, protected and hard spans."""

    target: KeySet
    taken: tuple[Span, ...]
    first: int
    stop: int

    def free(self) -> np.ndarray:
        """Which keys in [0, stop) a placebo may hold."""
        free = np.ones(self.stop, dtype=bool)
        free[: self.first] = False
        for start, stop in self.taken:
            free[start:stop] = False
        return free

    def starts(self, length: int) -> np.ndarray:
        """Starts of the windows of ``length`` free keys."""
        if length > self.stop:
            return np.zeros(0, dtype=int)
        blocked = np.concatenate([[0], np.cumsum(~self.free())])
        return np.flatnonzero(blocked[length:] == blocked[:-length])

    def windows(self, length: int) -> list[KeySet]:
        """Those windows as key sets, in order."""
        return [((start, start + length),) for start in self.starts(length).tolist()]


def room(target: KeySet, protect: Iterable[Span], hard: Iterable[Span], first: int, stop: int) -> Room:
    """Room beside a target; hard spans have a pool of their own and are no part of any other."""
    return Room(target, (*target, *protect, *hard), first, stop)


def hard_spans(hard: Iterable[Span], target: KeySet, protect: Iterable[Span]) -> list[KeySet]:
    """Each hard span as a set, sorted; those that meet the target or a protected span are no controls."""
    barred = (*target, *protect)
    return [(span,) for span in sorted(set(hard)) if not overlap((span,), barred)]


def unions(spans: Sequence[KeySet], seed: int) -> list[KeySet]:
    """Unions of 2 to 5 disjoint hard spans: all of them, or 1,024 drawn ones where there are more."""
    sizes = range(2, min(LARGEST_UNION, len(spans)) + 1)
    count = sum(math.comb(len(spans), k) for k in sizes)
    if count <= MOST_UNIONS:
        drawn: Iterable[tuple[int, ...]] = (pick for k in sizes for pick in combinations(range(len(spans)), k))
    else:
        drawn = sorted(_draw(len(spans), sizes, np.random.default_rng(seed)))
    merged = (tuple(sorted(spans[i][0] for i in pick)) for pick in drawn)
    return [keys for keys in merged if all(a[1] <= b[0] for a, b in pairwise(keys))]


def length_only(
    trace_n: int,
    target: Any,
    k: int,
    *,
    protect: Any = (),
    hard: Any = (),
    seed: int = 0,
    first: int = 4,
    stop: int | None = None,
) -> tuple[KeySet, ...]:
    """``k`` random, mutually disjoint windows of the target's length: the control that ignores strength.

    Parameters
    ----------
    trace_n : int
        Number of keys.
    target : key set
        What is ablated; windows have its number of tokens and share none of them.
    k : int
        Windows wanted.
    protect, hard : spans
        Tokens that no window may hold.
    seed : int
        Of the draw.
    first, stop : int
        Windows lie in [first, stop); stop defaults to ``trace_n``.

    Returns
    -------
    tuple of key sets
        In drawn order.

    Raises
    ------
    PromptError
        Spans that do not fit, or no room for k disjoint windows.
    """
    keys = key_set(target, trace_n)
    place = room(keys, span_list(protect, trace_n, "protect"), span_list(hard, trace_n, "hard"), first, stop or trace_n)
    windows = place.windows(size(keys))
    order = np.random.default_rng(seed).permutation(len(windows))
    chosen = disjoint([windows[i] for i in order], whole("k", k))
    if len(chosen) < k:
        raise PromptError(
            f"no room for {k} disjoint windows of {size(keys)} tokens in [{place.first}, {place.stop}) beside target, "
            f"protected and hard spans; allowed: at most {len(chosen)}"
        )
    return tuple(chosen)


def disjoint(ordered: Sequence[KeySet], k: int) -> list[KeySet]:
    """The first sets in the given order that share no key, k of them where that is possible at all.

    A set is passed over if taking it would leave no room for the rest, although k disjoint ones exist. For single spans
    that is exact (earliest stop first is the largest disjoint family); for others it is a rule of thumb.
    """
    most = min(k, len(_packed(ordered)))
    chosen: list[KeySet] = []
    left = list(ordered)
    while left and len(chosen) < most:
        candidate, *left = left
        rest = [keys for keys in left if not overlap(keys, candidate)]
        if len(chosen) + 1 + _enough(rest, most - len(chosen) - 1) >= most:
            chosen.append(candidate)
            left = rest
    return chosen


def dissimilar(ordered: Sequence[KeySet], k: int) -> list[KeySet]:
    """k sets, nearest first where that is free: as many that share no key as there are, then others.

    Sets that share keys have effects that go together, which a permutation of labels takes for a difference of the
    target's; so the largest family of disjoint sets comes first, from as few of the nearest as hold one of its size.
    The rest is filled up with sets whose Jaccard index to all chosen is at most 0.5, then with any.
    """
    chosen = _family(ordered, k)
    for keys in ordered:
        if len(chosen) < k and all(jaccard(keys, other) <= SIMILAR for other in chosen):
            chosen.append(keys)
    others = [keys for keys in ordered if keys not in chosen]
    return chosen + others[: k - len(chosen)]


def apart(sets: Sequence[KeySet]) -> tuple[bool, ...]:
    """Which of a few sets belong to their largest family without a shared key, the first such family in their order."""
    numbers = range(len(sets))
    for size_ in range(len(sets), 0, -1):
        for family in combinations(numbers, size_):
            if not any(overlap(sets[i], sets[j]) for i, j in combinations(family, 2)):
                return tuple(i in family for i in numbers)
    return ()


def _family(ordered: Sequence[KeySet], k: int) -> list[KeySet]:
    """At most k disjoint sets: as many as are found among all, from the shortest beginning that holds as many."""
    most = len(_widest(ordered, k))
    low, high = most, len(ordered)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_widest(ordered[:middle], k)) >= most else (middle + 1, high)
    return _widest(ordered[:high], k)


def _widest(ordered: Sequence[KeySet], k: int) -> list[KeySet]:
    """The larger of two greedy families: nearest first, and sets of few spans first."""
    families = []
    for order in (ordered, sorted(ordered, key=len)):
        family: list[KeySet] = []
        for keys in order:
            if len(family) < k and not any(overlap(keys, other) for other in family):
                family.append(keys)
        families.append(family)
    return max(families, key=len)


def whole(name: str, given: Any, least: int = 1) -> int:
    """A whole number of at least ``least``, or one line that quotes what was given."""
    if isinstance(given, bool) or not hasattr(given, "__index__") or given < least:
        raise InterventionError(f"{name}={quote(given)}; allowed: a whole number, at least {least}")
    return int(given)


def _packed(sets: Iterable[KeySet]) -> list[KeySet]:
    """A family of disjoint sets, earliest stop first: the largest there is where each is one span."""
    packed: list[KeySet] = []
    for keys in sorted(sets, key=lambda keys: (keys[-1][1], keys[0][0])):
        if not any(overlap(keys, other) for other in packed):
            packed.append(keys)
    return packed


def _enough(sets: list[KeySet], wanted: int) -> int:
    return 0 if wanted <= 0 else min(wanted, len(_packed(sets)))


def _draw(n: int, sizes: range, rng: np.random.Generator) -> set[tuple[int, ...]]:
    """Distinct random subsets, the same number of each size where there are that many."""
    drawn: set[tuple[int, ...]] = set()
    for k in sizes:
        share = min(math.comb(n, k), MOST_UNIONS // len(sizes))
        mine: set[tuple[int, ...]] = set()
        while len(mine) < share:
            mine.add(tuple(sorted(rng.choice(n, k, replace=False).tolist())))
        drawn |= mine
    return drawn

"""Token sets: as many tokens as the target has, taken from anywhere, put together to be as strong as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvprobe.placebo.keysets import KeySet, Span, size, union
from kvprobe.placebo.pools import Room
from kvprobe.placebo.scope import Scope
from kvprobe.placebo.strength import scan

PIECES = 4
"""Pieces of a set whose pieces begin where sentences begin."""


@dataclass(frozen=True)
class Units:
    """What sets are put together from, strongest first: spans of equal length, and the strength of each alone.

    A set takes ``count`` units and then has ``spare`` tokens too many, which its last units give up.
    """

    spans: list[Span]
    strengths: np.ndarray
    count: int
    spare: int

    @property
    def most(self) -> int:
        """Sets that there are units for."""
        return len(self.spans) // self.count

    def strongest(self) -> KeySet:
        """The set of the strongest units: about the strongest there is."""
        return self._set(range(self.count))

    def dealt(self, start: int, k: int) -> list[KeySet]:
        """k disjoint sets of nearly equal strength from the units after the ``start`` strongest.

        Each unit goes to the weakest set that still has room.
        """
        hands: list[list[int]] = [[] for _ in range(k)]
        held = np.zeros(k)
        for number in range(start, start + k * self.count):
            room = [j for j in range(k) if len(hands[j]) < self.count]
            weakest = min(room, key=lambda j: (held[j], j))
            hands[weakest].append(number)
            held[weakest] += self.strengths[number]
        return [self._set(hand) for hand in hands]

    def sums(self, k: int) -> np.ndarray:
        """Mean strength of the k sets dealt from each start, as if strengths added up; falls with the start."""
        return np.convolve(self.strengths, np.ones(k * self.count), "valid") / k

    def _set(self, numbers: Sequence[int]) -> KeySet:
        spans = [self.spans[number] for number in numbers]
        whole = len(spans) - self.spare
        return union(at for j, (start, stop) in enumerate(spans) for at in range(start, stop - (j >= whole)))


def single_tokens(scope: Scope, place: Room, measure: str) -> Units:
    """Every free token, strongest first."""
    return _units(scope, place.starts(1), 1, size(place.target), 0, measure)


def sentence_starts(scope: Scope, place: Room, boundaries: Sequence[Span], measure: str) -> Units | None:
    """The first tokens of every free sentence, a quarter of the target's length; None where there are too few."""
    length = size(place.target)
    count = min(PIECES, length)
    each = -(-length // count)
    free = {*place.starts(each).tolist()}
    starts: list[int] = []
    for start, stop in boundaries:
        if stop - start >= each and start in free and (not starts or start >= starts[-1] + each):
            starts.append(start)
    if len(starts) < count:
        return None
    return _units(scope, np.array(starts), each, count, each * count - length, measure)


def _units(scope: Scope, starts: np.ndarray, length: int, count: int, spare: int, measure: str) -> Units:
    alone = getattr(scan(scope, length), measure)[starts]
    starts, alone = starts[np.isfinite(alone)], alone[np.isfinite(alone)]
    order = np.lexsort((starts, -alone))
    spans = [(start, start + length) for start in starts[order].tolist()]
    return Units(spans, alone[order], count, spare)

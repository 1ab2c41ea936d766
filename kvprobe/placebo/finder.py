"""The pools that a target's placebos may come from, tried one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.errors import PromptError, TheoryError
from kvprobe.placebo.keysets import KeySet, Span, centre, size, text
from kvprobe.placebo.pools import Room, apart, disjoint, dissimilar, hard_spans, room, unions
from kvprobe.placebo.scope import Scope
from kvprobe.placebo.search import Choose, Goal, Pool, search
from kvprobe.placebo.strength import MEASURES, SCANNED, measure, scan
from kvprobe.placebo.tokens import Units, sentence_starts, single_tokens

REMEDIES = ("contiguous", "hard", "hard_set", "token_set")
DEALS = 12
"""Starts from which token sets are dealt, a round."""


@dataclass(frozen=True)
class Match:
    """Placebos of one target, or how far the strongest candidates were from being one.

    Attributes
    ----------
    target, match_on, k, caliper
        As asked for.
    remedy
        Pool that all placebos come from; None where no pool holds k of them.
    placebos
        k key sets, nearest first, or none.
    ln_ratios
        ln of each placebo's strength minus ln of the target's, in ``match_on``.
    strengths
        All measures of the target (first row) and the placebos.
    strongest
        Of each pool tried: strength of its strongest candidate over the target's; NaN where the pool is empty.
    tried
        Of each pool tried: candidates within the caliper.
    """

    target: KeySet
    match_on: str
    k: int
    caliper: float
    remedy: str | None
    placebos: tuple[KeySet, ...]
    ln_ratios: tuple[float, ...]
    strengths: pd.DataFrame
    strongest: dict[str, float]
    tried: dict[str, int]

    @property
    def apart(self) -> tuple[bool, ...]:
        """Which placebos share no key with one another, as many as there are: only those can stand for a target."""
        return apart(self.placebos)

    @property
    def matched(self) -> bool:
        """Has the target placebos?"""
        return self.remedy is not None


@dataclass(frozen=True)
class Finder:
    """One target, one measure, and the pools that its placebos may come from."""

    scope: Scope
    target: KeySet
    k: int
    match_on: str
    caliper: float
    profile_weight: float
    position_caliper: float | None
    hard: list[Span]
    protect: list[Span]
    boundaries: list[Span]
    first: int
    given_stop: int | None
    seed: int
    tabulate: bool = True

    def match(self, remedies: Iterable[str]) -> Match:
        """Try the pools in order."""
        strongest, tried = {}, {}
        for remedy in remedies:
            pool = self._pools[remedy]()
            strongest[remedy], tried[remedy] = pool.strongest(self.goal), len(pool.within(self.goal))
            if pool.chosen:
                return self._found(remedy, pool, strongest, tried)
        return self._found(None, _empty(), strongest, tried)

    @cached_property
    def goal(self) -> Goal:
        """The target's strength."""
        strengths = measure(self.scope, [self.target], sorted({self.match_on, "bound"})).iloc[0]
        theta, strength = float(strengths["bound"]), float(strengths[self.match_on])
        if not strength > 0:
            raise TheoryError(
                f"the target {text(self.target)} has the strength {strength:g} ({self.match_on}) for the rows of this "
                "trace; allowed: a target that some row sees"
            )
        return Goal(self.scope, self.target, self.match_on, strength, theta, self.k, self.caliper, self.profile_weight)

    @cached_property
    def stop(self) -> int:
        """End of the region that placebos lie in."""
        n = self.scope.trace.n
        if self.given_stop is not None:
            if self.given_stop > n:
                raise PromptError(f"stop = {self.given_stop} with n = {n} keys; allowed: at most {n}")
            return self.given_stop
        return n if self.scope.after else int(self.scope.queries.min())

    @cached_property
    def _pools(self) -> dict[str, Callable[[], Pool]]:
        return {
            "contiguous": self._contiguous,
            "hard": lambda: self._given(self._hard, disjoint),
            "hard_set": lambda: self._given(unions(self._hard, self.seed), dissimilar),
            "token_set": self._token_sets,
        }

    @cached_property
    def _room(self) -> Room:
        return room(self.target, self.protect, self.hard, self.first, self.stop)

    @cached_property
    def _hard(self) -> list[KeySet]:
        return hard_spans(self.hard, self.target, self.protect)

    def _contiguous(self) -> Pool:
        length = size(self.target)
        starts = self._room.starts(length)
        if not len(starts):
            return _empty()
        windows = self._known(length, lambda: scan(self.scope, length))
        sets = self._room.windows(length)
        return self._searched(sets, {name: getattr(windows, name)[starts] for name in SCANNED}, disjoint)

    def _given(self, sets: list[KeySet], choose: Choose) -> Pool:
        if not sets:
            return _empty()
        cheap = self._known(tuple(sets), lambda: measure(self.scope, sets, SCANNED, strict=False))
        return self._searched(sets, {name: cheap[name].to_numpy() for name in SCANNED}, choose)

    def _known(self, key: Any, work: Callable[[], Any]) -> Any:
        """What another finder of this scope has worked out, or work it out."""
        if key not in self.scope.known:
            self.scope.known[key] = work()
        return self.scope.known[key]

    def _token_sets(self) -> Pool:
        """Sentence-aligned sets where they do, single tokens otherwise."""
        name = self.match_on if self.match_on in SCANNED else "bound"
        aligned = sentence_starts(self.scope, self._room, self.boundaries, name) if self.boundaries else None
        pools = [self._dealt(aligned)] if aligned else []
        if not (pools and pools[0].chosen):
            pools.append(self._dealt(single_tokens(self.scope, self._room, name)))
        return max(pools, key=lambda pool: (len(pool.chosen), pool.exact.max(initial=0)))

    def _dealt(self, units: Units) -> Pool:
        """Sets dealt from a grid of starts, then from starts around where the measured strength meets the target's."""
        hands, known = min(self.k, units.most), dict[KeySet, float]()
        if hands < 1:
            return _empty()
        sums = units.sums(hands)
        grid = np.unique(np.geomspace(1, len(sums), DEALS).astype(int) - 1)
        self._learn(known, [units.strongest(), *(keys for start in grid for keys in units.dealt(start, hands))])
        means = np.array([np.mean([known.get(keys, np.nan) for keys in units.dealt(start, hands)]) for start in grid])
        middle = _crossing(sums, grid, means, self.goal.strength)
        near = np.unique(np.clip(middle + np.arange(-DEALS // 2, DEALS // 2), 0, len(sums) - 1))
        self._learn(known, [keys for start in near for keys in units.dealt(start, hands)])
        strengths = np.array([known[keys] for keys in sorted(known)])
        pool = Pool(sorted(known), strengths, strengths, disjoint)
        deals = [units.dealt(start, hands) for start in (*near, *grid)] if hands == self.k else []
        pool.chosen = pool.pick(self.goal) or pool.nearest_of(self.goal, deals)
        return pool

    def _learn(self, known: dict[KeySet, float], sets: Iterable[KeySet]) -> None:
        """Add the exact strengths of sets that are not known yet."""
        fresh = [keys for keys in dict.fromkeys(sets) if keys not in known and self._near(keys)]
        if fresh:
            strengths = measure(self.scope, fresh, [self.match_on], strict=False)[self.match_on]
            known |= dict(zip(fresh, strengths.fillna(0.0).tolist(), strict=True))

    def _searched(self, sets: list[KeySet], scanned: dict[str, np.ndarray], choose: Choose) -> Pool:
        usable = np.array([self._near(keys) for keys in sets]) & np.isfinite(scanned["bound"])
        kept = [keys for keys, good in zip(sets, usable, strict=True) if good]
        theta = scanned["bound"][usable]
        exact = scanned[self.match_on][usable] if self.match_on in SCANNED else np.full(len(kept), np.nan)
        pool = Pool(kept, theta, exact, choose)
        search(self.goal, pool)
        return pool

    def _near(self, keys: KeySet) -> bool:
        """Within the position caliper."""
        if self.position_caliper is None:
            return True
        return abs(centre(keys) - centre(self.target)) <= self.position_caliper * self.stop

    def _found(self, remedy: str | None, pool: Pool, strongest: dict[str, float], tried: dict[str, int]) -> Match:
        placebos = tuple(pool.sets[i] for i in pool.chosen)
        ln_ratios = tuple(self.goal.ln_ratios(pool.exact[pool.chosen]).tolist())
        # The table of several matches is made at once, by whoever asked for them.
        strengths = measure(self.scope, [self.target, *placebos], MEASURES) if self.tabulate else pd.DataFrame()
        settings = (self.target, self.match_on, self.k, self.caliper)
        return Match(*settings, remedy, placebos, ln_ratios, strengths, strongest, tried)


def _empty() -> Pool:
    return Pool([], np.zeros(0), np.zeros(0), disjoint)


def _crossing(sums: np.ndarray, grid: np.ndarray, means: np.ndarray, strength: float) -> int:
    """Start whose sets should have the wanted strength: sums of single strengths, scaled as the grid turned out."""
    usable = np.isfinite(means) & (means > 0) & (sums[grid] > 0)
    if not usable.any():
        return 0
    scale = np.interp(np.arange(len(sums)), grid[usable], means[usable] / sums[grid][usable])
    with np.errstate(divide="ignore"):
        return int(np.argmin(np.abs(np.log(sums * scale) - np.log(strength))))

"""Among many candidates, those as strong as the target: exact for a few, by a learnt proxy for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvprobe.placebo.keysets import KeySet, overlap
from kvprobe.placebo.scope import Scope
from kvprobe.placebo.strength import SCANNED, measure, profiles

CHUNK = 64
MOST_EXACT = 256
STRONGEST = 8
PILOT = 16
Choose = Callable[[Sequence[KeySet], int], list[KeySet]]


@dataclass(frozen=True)
class Goal:
    """What a placebo has to equal: the target's strength, and how near is near enough."""

    scope: Scope
    target: KeySet
    match_on: str
    strength: float
    theta: float
    k: int
    caliper: float
    profile_weight: float = 0.0

    def ln_ratios(self, strengths: np.ndarray) -> np.ndarray:
        """ln strength − ln target's strength; −∞ at 0, NaN stays NaN."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(strengths) - np.log(self.strength)


@dataclass
class Pool:
    """Candidates of one remedy, and what is known of them.

    Attributes
    ----------
    sets
        Sorted candidates.
    theta
        Their θ, the proxy for measures that are dear.
    exact
        Their strength in the matched measure, NaN where it was not worked out.
    choose
        Picks k of the candidates within the caliper, given nearest first.
    """

    sets: list[KeySet]
    theta: np.ndarray
    exact: np.ndarray
    choose: Choose
    chosen: list[int] = field(default_factory=list)

    def within(self, goal: Goal) -> np.ndarray:
        """Numbers of the candidates within the caliper, nearest first."""
        ln_ratios = np.abs(goal.ln_ratios(self.exact))
        near = np.flatnonzero(ln_ratios <= goal.caliper)
        far = ln_ratios[near] + goal.profile_weight * self._profile_distances(goal, near)
        return near[np.lexsort((near, far))]

    def pick(self, goal: Goal) -> list[int]:
        """k candidates within the caliper, or none."""
        near = self.within(goal)
        number = {self.sets[i]: i for i in near[::-1]}
        found = self.choose([self.sets[i] for i in near], goal.k) if len(near) >= goal.k else []
        return [number[keys] for keys in found] if len(found) == goal.k else []

    def nearest_of(self, goal: Goal, groups: Iterable[Sequence[KeySet]]) -> list[int]:
        """The group whose members are all within the caliper and whose farthest is nearest, or none."""
        order = {self.sets[i]: i for i in self.within(goal)}
        whole = [
            sorted((order[keys] for keys in group), key=[*order.values()].index)
            for group in groups
            if all(keys in order for keys in group)
        ]
        return min(whole, key=lambda group: np.abs(goal.ln_ratios(self.exact[group])).max(), default=[])

    def strongest(self, goal: Goal) -> float:
        """The strongest candidate's strength over the target's, NaN for an empty pool."""
        known = self.exact[np.isfinite(self.exact)]
        return float(known.max() / goal.strength) if len(known) else float("nan")

    def _profile_distances(self, goal: Goal, numbers: np.ndarray) -> np.ndarray:
        """Root mean square difference of ln θ to the target's, over cells of layer × head that both are seen in."""
        if not goal.profile_weight or not len(numbers):
            return np.zeros(len(numbers))
        with np.errstate(divide="ignore", invalid="ignore"):
            own, *others = np.log(profiles(goal.scope, [goal.target, *(self.sets[i] for i in numbers)]).numpy())
            squares = (np.stack(others) - own) ** 2
        seen = np.isfinite(squares)
        return np.sqrt(np.where(seen, squares, 0).sum(1) / np.maximum(1, seen.sum(1)))


def search(goal: Goal, pool: Pool) -> None:
    """Work out exact strengths where they matter, until k candidates are within the caliper, and pick them.

    Measures that a scan gives are exact already. For the others: the strongest few and a pilot by θ, then chunks of the
    nearest by θ · (strength / θ of those known), as long as one left could reach the caliper and at most 256 in all.
    """
    if goal.match_on in SCANNED:
        pool.chosen = pool.pick(goal)
        return
    usable = np.isfinite(pool.theta) & (pool.theta > 0)
    _exact(goal, pool, _pilot(goal, pool, usable))
    while True:
        left = np.flatnonzero(usable & np.isnan(pool.exact))
        distance, slack = _proxy(goal, pool, left)
        known = int((usable & ~np.isnan(pool.exact)).sum())
        done = known >= min(CHUNK, int(usable.sum()))
        pool.chosen = pool.pick(goal) if done else []
        reachable = left[np.abs(distance) <= goal.caliper + slack] if done else left
        if pool.chosen or not len(reachable) or known >= MOST_EXACT:
            return
        order = np.argsort(np.abs(distance), kind="stable")
        _exact(goal, pool, left[order][: CHUNK - PILOT if known <= PILOT else CHUNK])


def _pilot(goal: Goal, pool: Pool, usable: np.ndarray) -> np.ndarray:
    """The strongest few that do not meet each other, and the nearest to the target in θ."""
    numbers = np.flatnonzero(usable)
    strongest: list[int] = []
    for i in numbers[np.argsort(-pool.theta[numbers], kind="stable")].tolist():
        if len(strongest) < STRONGEST and not any(_same(pool, i, j) for j in strongest):
            strongest.append(i)
    near = numbers[np.argsort(np.abs(np.log(pool.theta[numbers] / goal.theta)), kind="stable")]
    return np.array(list(dict.fromkeys([*strongest, *near.tolist()]))[:PILOT], dtype=int)


def _same(pool: Pool, i: int, j: int) -> bool:
    """Single spans that overlap are nearly the same candidate; unions of the same spans are not."""
    one, other = pool.sets[i], pool.sets[j]
    return len(one) == len(other) == 1 and overlap(one, other)


def _proxy(goal: Goal, pool: Pool, left: np.ndarray) -> tuple[np.ndarray, float]:
    """ln strength − ln target's strength as θ predicts it, and how wrong that was where the truth is known."""
    known = np.isfinite(pool.exact) & (pool.exact > 0)
    if not known.any():
        return np.log(pool.theta[left] / goal.theta), np.log(4.0)
    ln_ratio = np.log(pool.exact[known] / pool.theta[known])
    middle = float(np.median(ln_ratio))
    return goal.ln_ratios(pool.theta[left]) + middle, float(np.abs(ln_ratio - middle).max())


def _exact(goal: Goal, pool: Pool, numbers: np.ndarray) -> None:
    if len(numbers):
        found = measure(goal.scope, [pool.sets[i] for i in numbers], [goal.match_on], strict=False)
        # A set without an attention row left is unusable, and must not be asked for again.
        pool.exact[numbers] = found[goal.match_on].fillna(0.0)

"""run(): the trials of both scores, the stored rule, the causal check and the single heads, in this order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvprobe import parts
from kvprobe.errors import InterventionError, TaskError
from kvprobe.eviction.budgets.profiles import HeadProfile
from kvprobe.heads.checking import Causal, causal
from kvprobe.heads.grid import Cell, Grid
from kvprobe.heads.profiling import profile_of
from kvprobe.heads.rule import decide, measure
from kvprobe.heads.scanning import Trial, gather, trial
from kvprobe.heads.settings import Settings
from kvprobe.heads.single_heads import knockouts

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
SEMANTICS = "prefill-then-evict: the context is prefilled exactly, masks apply to question and answer tokens"


@dataclass(frozen=True)
class Scan:
    """What was measured.

    Attributes
    ----------
    trials, reasoning_trials
        Trials of the retrieval score, and of the reasoning score (the same where one task gives both).
    rule
        Which layers the first-layer rule leaves out, and why.
    causal
        The check of the top heads, or None.
    single
        The evidence masked in one head at a time, or None.
    """

    settings: Settings
    trials: tuple[Trial, ...]
    reasoning_trials: tuple[Trial, ...]
    rule: dict[str, Any]
    causal: Causal | None
    single: pd.DataFrame | None
    profiles: dict[str, HeadProfile] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    why_unchecked: str | None = None

    def of(self, kind: str) -> tuple[Trial, ...]:
        """Trials of one kind of score."""
        return self.trials if kind == "retrieval" else self.reasoning_trials

    @cached_property
    def scores(self) -> dict[str, Array | None]:
        """Kind → mean score of every head [L, H]; None where no trial was answered."""
        return {
            kind: np.array(self.profiles[kind].scores) if kind in self.profiles else None
            for kind in ("retrieval", "reasoning")
        }


def scanned(
    model: Any,
    settings: Settings,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    keep: parts.Keep = parts.afresh,
) -> Scan:
    """Run everything that ``settings`` ask for.

    Raises
    ------
    TaskError
        No trial of the retrieval score was answered: then there is no head to check.
    """
    begun = time.perf_counter()
    second = settings.reasoning_grid
    cells = [(settings.grid, cell) for cell in settings.grid.cells()]
    cells += [] if second is None else [(second, cell) for cell in second.cells()]
    done = [
        keep(f"trial {number}", partial(_trial, model, settings, grid, cell))
        for number, (grid, cell) in enumerate(progress(cells))
    ]
    first = tuple(each for each, _ in done[: len(settings.grid.cells())])
    reasoning = first if second is None else tuple(each for each, _ in done[len(first) :])
    profiles = _profiles(model, settings, first, reasoning)
    tried = time.perf_counter()
    scores = np.array(profiles["retrieval"].scores)
    items = [settings.check_item(model, index) for index in range(settings.items)]
    checked, why = _checked(model, settings, scores, items, keep)
    after = time.perf_counter()
    single = keep("knockouts", partial(_single, model, settings)) if settings.knockouts else None
    ended = time.perf_counter()
    timings = {"trials_s": tried - begun, "causal_s": after - tried, "knockouts_s": ended - after}
    report = decide([seen for _, seen in done], settings.rule)
    return Scan(settings, first, reasoning, report, checked, single, profiles, timings, why)


def validate(model: Any, settings: Settings) -> None:
    """Refuse everything that can be refused before anything is computed or written."""
    for grid in (settings.grid, settings.reasoning_grid or settings.grid):
        for cell in _ends(grid):
            grid.item(model, cell)
    heads = model.geometry.n_layers * model.geometry.n_heads
    if settings.k >= heads:
        raise TaskError(f"top is {settings.k}, must be less than the model's {heads} heads")
    shortest = min(settings.grid.lengths) - settings.grid.new_tokens
    if not settings.rule.stage1(shortest):
        raise TaskError(
            f"rule cache {settings.rule.cache:g} leaves no key to select at {shortest} tokens; allowed: at least "
            f"{1 / (settings.rule.alpha * shortest):.2g}"
        )
    if settings.items or settings.knockouts:
        try:
            settings.check_item(model, 0)
        except TaskError as error:
            raise TaskError(f"the causal check: {error}") from None


def _ends(grid: Grid) -> Sequence[Cell]:
    """The cells of the shortest and the longest length, of the first seed."""
    cells = [cell for cell in grid.cells() if cell.seed == grid.seeds[0]]
    return [cell for cell in cells if cell.length in (min(grid.lengths), max(grid.lengths))]


def _trial(model: Any, settings: Settings, grid: Grid, cell: Cell) -> tuple[Trial, dict[str, Any]]:
    """One trial, and what the rule sees in the rows that wrote its answer."""
    seen: list[dict[str, Any]] = []

    def look(done: Any) -> None:
        seen.append(measure(done.trace, settings.rule))

    more: dict[str, Any] = {"span": settings.span, "new_tokens": grid.new_tokens, "look": look}
    done = trial(model, cell, grid.item(model, cell), **more)
    (looked,) = seen
    return done, looked


def _single(model: Any, settings: Settings) -> pd.DataFrame:
    """The evidence of the check's first item masked in one head at a time."""
    return knockouts(model, settings.check_item(model, 0), p=settings.p)


def _checked(
    model: Any, settings: Settings, scores: Array, items: Sequence[Any], keep: parts.Keep
) -> tuple[Causal | None, str | None]:
    """The causal check, or why there is none: after a long scan that is no reason to lose everything else."""
    if not items:
        return None, "no items were asked for (--items 0)"
    try:
        how = {"k": settings.k, "draws": settings.draws, "seed": settings.seed}
        return causal(model, scores, items, **how, keep=parts.under(keep, "causal check")), None
    except InterventionError as error:
        return None, str(error)


def _profiles(
    model: Any, settings: Settings, trials: Sequence[Trial], reasoning: Sequence[Trial]
) -> dict[str, HeadProfile]:
    """Profiles of both kinds; without an answered trial there is none of the reasoning score."""
    found = {"retrieval": profile_of(model, settings.grid, trials, kind="retrieval", span=settings.span)}
    grid = settings.reasoning_grid or settings.grid
    try:
        gather(reasoning, "reasoning")
    except TaskError:
        return found
    return found | {"reasoning": profile_of(model, grid, reasoning, kind="reasoning", span=settings.span)}

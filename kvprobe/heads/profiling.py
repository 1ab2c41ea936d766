"""profile(): the scores of all heads as a profile that eviction budgets read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvprobe.eviction.budgets.profiles import HeadProfile
from kvprobe.heads.grid import Cell, Grid
from kvprobe.heads.scanning import THRESHOLD, Trial, gather, scan
from kvprobe.versions import versions


def profile(
    model: Any,
    grid: Grid | None = None,
    *,
    kind: str = "retrieval",
    span: str = "value",
    threshold: float = THRESHOLD,
    progress: Callable[[Iterable[Cell]], Iterable[Cell]] = iter,
) -> HeadProfile:
    """Scan a grid and average the scores of every head over the trials that were answered.

    Parameters
    ----------
    kind
        ``"retrieval"`` (:func:`retrieval_scores`) or ``"reasoning"`` (:func:`reasoning_scores`).
    grid, span, progress
        See :func:`scan`.
    threshold
        A trial counts if its ROUGE-1 recall (retrieval) or token F1 (reasoning) is above it.

    Returns
    -------
    HeadProfile
        For :func:`kvprobe.eviction.budgets.write_profile`; ``docs/head_profile.schema.json`` describes the file.

    Raises
    ------
    TaskError
        No trial was answered, or what :func:`scan` refuses.

    Examples
    --------
    >>> heads = profile(model, Grid(lengths=(600,), seeds=(0,)))    # doctest: +SKIP
    """
    grid = Grid() if grid is None else grid
    trials = scan(model, grid, span=span, progress=progress)
    return profile_of(model, grid, trials, kind=kind, span=span, threshold=threshold)


def profile_of(
    model: Any,
    grid: Grid,
    trials: Sequence[Trial],
    *,
    kind: str = "retrieval",
    span: str = "value",
    threshold: float = THRESHOLD,
) -> HeadProfile:
    """The profile of trials that :func:`scan` has made, so that one scan serves both kinds (see :func:`profile`)."""
    found = gather(trials, kind, threshold)
    facts = {
        "revision": model.revision,
        "task": grid.task,
        "seeds": list(grid.seeds),
        "lengths": list(grid.lengths),
        "depths": list(grid.depths),
        "needles": grid.needles,
        "new_tokens": grid.new_tokens,
        "options": {name: str(value) for name, value in grid.options.items()},
        "span": span,
        "threshold": threshold,
        "n": found.n,
        "n_kept": found.n_kept,
        "dtype": model.meta["dtype"],
        "versions": versions(),
    }
    return HeadProfile(model.name, kind, found.scores.tolist(), facts)

"""scan(): the trials of a whole grid, and the mean scores of those that were answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvprobe.errors import TaskError, quote
from kvprobe.heads.grid import Cell, Grid
from kvprobe.heads.reasoning import reasoning_scores
from kvprobe.heads.retrieval import retrieval_scores
from kvprobe.heads.trials import Decoded, decoded
from kvprobe.tasks.items import Item

Array = NDArray[np.float64]

KINDS = {"retrieval": "recall", "reasoning": "f1"}
"""Kind of score → the measure of the answer that decides whether a trial is kept."""

THRESHOLD = 0.5


@dataclass(frozen=True, eq=False)
class Trial:
    """What one cell came to: the answer, and both scores [L, H]."""

    cell: Cell
    tokens: int
    gold: str
    text: str
    recall: float
    f1: float
    retrieval: Array
    reasoning: Array
    seconds: float

    def kept(self, kind: str, threshold: float = THRESHOLD) -> bool:
        """Whether the answer is good enough to count: recall for retrieval, F1 for reasoning, above the threshold."""
        return bool(getattr(self, KINDS[_known(kind)]) > threshold)


@dataclass(frozen=True, eq=False)
class Gathered:
    """Mean scores [L, H] over the ``n_kept`` of ``n`` trials."""

    scores: Array
    n: int
    n_kept: int


def trial(
    model: Any,
    cell: Cell,
    item: Item,
    *,
    span: str = "value",
    new_tokens: int = 50,
    look: Callable[[Decoded], None] | None = None,
) -> Trial:
    """Decode one item and score every head both ways (see :func:`kvprobe.heads.decoded`).

    ``look`` is shown what was decoded, with its trace, before that is let go.
    """
    begun = time.perf_counter()
    done = decoded(model, item, span=span, new_tokens=new_tokens)
    if look is not None:
        look(done)
    retrieval, reasoning = retrieval_scores(done), reasoning_scores(done)
    answer = (len(item.prompt), item.references[0], done.text, done.recall, done.f1)
    return Trial(cell, *answer, retrieval, reasoning, time.perf_counter() - begun)


def scan(
    model: Any,
    grid: Grid | None = None,
    *,
    span: str = "value",
    progress: Callable[[Iterable[Cell]], Iterable[Cell]] = iter,
) -> list[Trial]:
    """The trials of all cells of a grid, in its order.

    Parameters
    ----------
    grid
        By default ``Grid()``: 5 lengths × 5 depths × 2 seeds.
    span
        See :func:`kvprobe.heads.decoded`.
    progress
        Wraps the cells (tqdm, for instance).

    Raises
    ------
    TaskError
        A length at which the task cannot be built (naming the smallest that works), or what ``decoded`` refuses.
    """
    grid = Grid() if grid is None else grid
    cells = progress(grid.cells())
    return [trial(model, cell, grid.item(model, cell), span=span, new_tokens=grid.new_tokens) for cell in cells]


def gather(trials: Sequence[Trial], kind: str = "retrieval", threshold: float = THRESHOLD) -> Gathered:
    """Mean scores over the trials whose answer is good enough.

    Raises
    ------
    TaskError
        None is, or an unknown kind.
    """
    kept = [getattr(each, kind) for each in trials if each.kept(kind, threshold)]
    if not kept:
        best = max((getattr(each, KINDS[_known(kind)]) for each in trials), default=0.0)
        raise TaskError(
            f"none of {len(trials)} trials has {KINDS[kind]} > {threshold:g} (best {best:.2f}): no answer "
            "holds the value, so heads have no scores; allowed: shorter lengths, an easier task, more new tokens"
        )
    return Gathered(np.mean(kept, axis=0), len(trials), len(kept))


def top(scores: Array, k: int = 10) -> list[tuple[int, int, float]]:
    """The k heads of the largest scores [L, H] as (layer, head, score), of equals the first."""
    best = np.argsort(-scores, axis=None, kind="stable")[:k]
    return [(int(i // scores.shape[1]), int(i % scores.shape[1]), float(scores.flat[i])) for i in best]


def share(scores: Array, threshold: float = 0.1) -> float:
    """Share of heads with a score of at least ``threshold`` (0.1: Wu et al.'s retrieval heads)."""
    return float((scores >= threshold).mean())


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise TaskError(f"kind is {quote(kind)}, must be one of {', '.join(KINDS)}")
    return kind

"""Everything about a scan of heads that is decided before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvprobe import tasks
from kvprobe.errors import TaskError, quote
from kvprobe.heads.grid import Grid
from kvprobe.heads.rule import Rule
from kvprobe.heads.trials import SPANS
from kvprobe.inputs import words
from kvprobe.tasks.items import Item

CAUSAL_SEEDS = 1 << 48
"""Items of the causal check are made with seeds from here on: those of a grid's cells lie below."""


@dataclass(frozen=True)
class Settings:
    """Everything that is decided before a run, and stored with it.

    Attributes
    ----------
    grid
        Trials of the retrieval score, all its seeds.
    reasoning_task
        The needle task whose trials (same lengths, depths and needles, first seed) give the reasoning score; None: the
        trials of ``grid`` give both.
    span
        What must be copied: the ``"value"`` asked for, or the whole ``"needle"``.
    threshold
        A head at or above it is a retrieval head.
    k, draws, items, length
        The causal check: so many top heads against so many draws of other heads of the same layers, on so many items
        of this length (None: the grid's longest; like the grid's it leaves ``new_tokens`` free). Their needles are not
        the trials'; the essays around them are.
    knockouts
        Mask the evidence in one head at a time, for all heads, on the first item of the check.
    rule
        Which layers are too diffuse to keep (see :class:`kvprobe.heads.Rule`).
    p
        The norm of the closed-form perturbation.
    """

    grid: Grid = field(default_factory=Grid)
    reasoning_task: str | None = "niah_multikey_1"
    span: str = "value"
    threshold: float = 0.1
    k: int = 10
    draws: int = 8
    items: int = 12
    length: int | None = None
    knockouts: bool = True
    rule: Rule = field(default_factory=Rule)
    seed: int = 0
    p: int = 1

    def __post_init__(self) -> None:
        if self.span not in SPANS:
            raise TaskError(f"span is {quote(self.span)}, must be one of {', '.join(SPANS)}")
        if self.reasoning_task is not None and self.reasoning_task not in tasks.names():
            raise TaskError(f"no task {quote(self.reasoning_task)}, must be one of {', '.join(tasks.names())}, or none")
        _ = self.reasoning_grid  # a grid refuses a task that asks for several values
        for name, least in (("k", 1), ("draws", 1), ("items", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise TaskError(f"{name} is {quote(value)}, must be a whole number of at least {least}")
        if not 0 < self.threshold <= 1:
            raise TaskError(f"threshold is {self.threshold:g}, must be above 0 and at most 1")
        if self.p not in (1, 2):
            raise TaskError(f"p is {quote(self.p)}, must be 1 or 2")

    @property
    def reasoning_grid(self) -> Grid | None:
        """Trials of the reasoning score, or None where the grid's own serve."""
        if self.reasoning_task is None or self.reasoning_task == self.grid.task:
            return None
        return replace(self.grid, task=self.reasoning_task, seeds=self.grid.seeds[:1])

    @property
    def check_length(self) -> int:
        """Tokens of an item of the causal check."""
        return max(self.grid.lengths) if self.length is None else self.length

    def check_item(self, model: Any, index: int) -> Item:
        """Make item ``index`` of the causal check."""
        options = {"distractors": 0} | dict(self.grid.options) | {"tokens_to_generate": self.grid.new_tokens}
        seed = CAUSAL_SEEDS + self.seed * 10_000 + index
        return tasks.make(self.grid.task, model, length=self.check_length, seed=seed, **options)


def from_command(given: Mapping[str, Any]) -> Settings:
    """Settings from the words of ``kvprobe heads``."""
    seeds = tuple(given["seed"] + number for number in range(given["seeds"]))
    options = {} if given["haystack"] is None else {"path": str(given["haystack"])}
    shape: dict[str, Any] = {
        "task": given["task"],
        "seeds": seeds,
        "options": options,
        "new_tokens": given["new_tokens"],
    }
    grid = _full(given, shape) if given["full"] else _grid(given, shape)
    plain = {name: given[name] for name in ("span", "threshold", "draws", "items", "length", "knockouts", "seed")}
    reasoning = None if given["reasoning_task"] == "none" else given["reasoning_task"]
    rule = Rule(cache=given["rule_cache"])
    return Settings(grid, reasoning, k=given["top"], rule=rule, p=given["norm"], **plain)


def _grid(given: Mapping[str, Any], shape: dict[str, Any]) -> Grid:
    """The default grid, with what was given in its place."""
    if given["longest"] is not None:
        raise TaskError(f"--longest {given['longest']} goes with --full only; allowed: --lengths with commas")
    shape |= {name: _numbers(name, given[name]) for name in ("lengths", "depths") if given[name] is not None}
    return Grid(**shape | ({} if given["needles"] is None else {"needles": given["needles"]}))


def _full(given: Mapping[str, Any], shape: dict[str, Any]) -> Grid:
    """The grid of Wu et al., up to 50,000 tokens or the length given."""
    if named := [name for name in ("lengths", "depths", "needles") if given[name] is not None]:
        raise TaskError(f"--full and --{named[0]} exclude each other: give one of them")
    longest = 50_000 if given["longest"] is None else given["longest"]
    return Grid.full(min(1000, longest // 20), longest, **shape)


def _numbers(name: str, text: str) -> tuple[Any, ...]:
    """Whole lengths, or depths in per cent, from a comma-separated list."""
    kind, example = (int, "300,600") if name == "lengths" else (float, "0,50,100")
    try:
        found = tuple(kind(word) for word in words(text))
    except ValueError:
        found = ()
    if not found:
        raise TaskError(f"{name} is {quote(text)}, must be numbers with commas, like {example}")
    return found

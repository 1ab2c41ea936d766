"""Where needles are hidden: a grid of lengths × depths × needles × seeds, and the item of each cell."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvprobe import tasks
from kvprobe.errors import TaskError, quote
from kvprobe.tasks.items import Item
from kvprobe.tasks.niah import TASKS

LENGTHS = (300, 600, 900, 1200, 1500)
DEPTHS = (0, 25, 50, 75, 100)


@dataclass(frozen=True)
class Cell:
    """One place of a grid: tokens of prompt and answer, depth in per cent, number of the needle, and seed."""

    length: int
    depth: float
    needle: int
    seed: int

    @property
    def item_seed(self) -> int:
        """The seed of this cell's item: it does not depend on the grid, and is none that other commands count up to."""
        text = f"{self.seed}|{self.needle}|{self.length}|{float(self.depth)}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


@dataclass(frozen=True)
class Grid:
    """Lengths × depths × needles × seeds of one task with one asked value.

    Attributes
    ----------
    task
        A needle task that asks for one value.
    lengths
        Tokens of prompt and answer together.
    depths
        Depths of the needle in per cent.
    needles
        Different needles at each length and depth.
    seeds
        Each repeats the whole grid with other needles, keys and essays.
    new_tokens
        The most tokens that are decoded, left free of the length.
    options
        Options of the task (:class:`kvprobe.tasks.options.Options`).

    Examples
    --------
    >>> len(Grid().cells()), len(Grid.full(seeds=(0,)).cells())
    (50, 600)
    """

    task: str = "niah_single_2"
    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[float, ...] = DEPTHS
    needles: int = 1
    seeds: tuple[int, ...] = (0, 1)
    new_tokens: int = 50
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.task not in tasks.names():
            raise TaskError(f"no task {self.task!r}, must be one of {', '.join(tasks.names())}")
        _one_value(self.task, self.options)
        for name in ("needles", "new_tokens"):
            _whole(name, getattr(self, name))
        for name in ("lengths", "depths", "seeds"):
            object.__setattr__(self, name, _each_once(name, getattr(self, name)))
        for length in self.lengths:
            _whole("lengths", length)
        if taken := sorted({"depth", "depths", "tokens_to_generate"} & set(self.options)):
            raise TaskError(f"options name {taken[0]!r}: the grid sets it (lengths, depths, new_tokens)")

    @classmethod
    def full(cls, shortest: int = 1000, longest: int = 50_000, **given: Any) -> Grid:
        """20 lengths × 10 depths × 3 needles, the grid of Wu et al. (arXiv 2404.15574), evenly spaced."""
        steps = [shortest + round((longest - shortest) * step / 19) for step in range(20)]
        depths = tuple(round(100 * step / 9, 1) for step in range(10))
        published: dict[str, Any] = {"lengths": tuple(steps), "depths": depths, "needles": 3}
        return cls(**published | given)

    def cells(self) -> list[Cell]:
        """All cells, seed by seed."""
        axes = itertools.product(self.seeds, range(self.needles), self.lengths, self.depths)
        return [Cell(length, depth, needle, seed) for seed, needle, length, depth in axes]

    def item(self, model: Any, cell: Cell) -> Item:
        """The item of one cell; the same cell gives the same item in every grid of this task and these options."""
        options = {"distractors": 0} | dict(self.options)
        more = {"depth": cell.depth, "tokens_to_generate": self.new_tokens}
        return tasks.make(self.task, model, length=cell.length, seed=cell.item_seed, **options, **more)

    def items(self, model: Any) -> Iterator[tuple[Cell, Item]]:
        """Every cell with its item, made one at a time."""
        return ((cell, self.item(model, cell)) for cell in self.cells())


def _one_value(task: str, options: Mapping[str, Any]) -> None:
    """Refuse a task that asks for several values: which of them a head copies would not be one score."""

    def asked(name: str) -> int:
        variant = TASKS[name]
        return int(options.get("queries", variant.queries)) * int(options.get("values", variant.values))

    if asked(task) > 1:
        single = [name for name in TASKS if asked(name) == 1]
        raise TaskError(f"{task} asks for {asked(task)} values; heads are scored on one: {', '.join(single) or 'none'}")


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TaskError(f"{name} is {quote(value)}, must be a whole number of at least 1")


def _each_once(name: str, given: Any) -> tuple[Any, ...]:
    """A non-empty tuple of different numbers."""
    values = () if isinstance(given, (str, int)) else tuple(given)
    if not values or len(set(values)) < len(values):
        raise TaskError(f"{name} is {quote(given)}, must be one or more numbers, each once")
    return values

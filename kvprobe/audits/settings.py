"""Everything about an audit that is decided before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprobe import cells, curves, tasks
from kvprobe.audits.sweeps import CACHES as SWEEP_CACHES
from kvprobe.audits.sweeps import VALUES, Sweep
from kvprobe.audits.tables import LEVELS
from kvprobe.cells import Arm, Pair, pairs_of
from kvprobe.cells.reading import Reading
from kvprobe.cells.reading import from_command as reading_from
from kvprobe.errors import EvictionError, TaskError, quote
from kvprobe.eviction.compose import PRESETS
from kvprobe.eviction.policies import ratio
from kvprobe.inputs import words
from kvprobe.tasks.document import Document
from kvprobe.theory.checks import check_p

SWEEPS = tuple(VALUES)
BASES = ("snapkv", "adakv")
CACHES = ("0.1", "0.2", "0.4")
SECOND_STAGE = "+two_stage"


@dataclass(frozen=True)
class Settings:
    """Decided before a run, and stored with it.

    Attributes
    ----------
    pairs
        Policies that select by attention alone, each with Algorithm 1 on it.
    caches
        Shares of the cache to keep, as written.
    levels
        ``"layer"``, ``"head"``, or both.
    reading
        The documents and the probe.
    sweeps, sweep_caches
        Which of :data:`SWEEPS` are run on the first pair of every preset, and at which shares of the cache.
    task, items, setting
        What the sweeps' scores are of; 0 items: no scores. ``"context"``: the question is unseen when the cache is
        compressed; ``"joint"``: it is compressed, too (see :class:`kvprobe.curves.Settings`).
    norm
        p of L and of the bounds.
    seed
        Of the items, and of the resampling behind intervals.
    """

    pairs: tuple[Pair, ...]
    caches: tuple[str, ...] = CACHES
    levels: tuple[str, ...] = LEVELS
    reading: Reading = field(default_factory=Reading)
    sweeps: tuple[str, ...] = ()
    sweep_caches: tuple[str, ...] = SWEEP_CACHES
    task: str = "niah_single_1"
    items: int = 10
    setting: str = "context"
    norm: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_p(self.norm)
        _some("level", self.levels, LEVELS)
        if self.sweeps:
            _some("sweep", self.sweeps, SWEEPS)
        if self.task not in tasks.names():
            raise TaskError(f"no task {self.task!r}, must be one of {', '.join(tasks.names())}")
        if self.setting not in curves.SETTINGS:
            raise TaskError(f"setting is {quote(self.setting)}, must be one of {', '.join(curves.SETTINGS)}")
        if isinstance(self.items, bool) or not isinstance(self.items, int) or self.items < 0:
            raise TaskError(f"items is {quote(self.items)}, must be a whole number of at least 0")
        if not self.pairs or not self.caches:
            raise EvictionError("no policy or no cache ratio was given; allowed: one or more of each")
        if not self.sweep_caches:
            raise EvictionError("no cache ratio of a sweep was given; allowed: one or more")
        for cache in (*self.caches, *self.sweep_caches):
            ratio(cache)

    @property
    def arms(self) -> list[Arm]:
        """All policies of all pairs at all sizes; σ and θ̂ of both policies of a pair are of the same first stage."""
        return [
            Arm(arm.policy, arm.cache, getattr(pair.ours.selector, "alpha", None))
            for pair in self.pairs
            for arm in pair.arms(self.caches)
        ]

    @property
    def scored(self) -> dict[str, Any]:
        """What the sweeps' scores are asked with."""
        return {"task": self.task, "items": self.items, "seed": self.seed, "setting": self.setting}

    def swept(self) -> list[Sweep]:
        """The sweeps: of the first pair of every preset."""
        first = {pair.preset: pair for pair in reversed(self.pairs)}
        chosen = [pair for pair in self.pairs if first[pair.preset] is pair]
        return [Sweep(kind, pair) for kind in self.sweeps for pair in chosen]

    def refuse(self, model: Any, documents: Sequence[Document]) -> None:
        """Refuse everything that can be refused before anything is computed."""
        cells.refuse(model, *cells.extent(model, documents, self.reading.probe), self.arms)


def from_command(given: Mapping[str, Any]) -> Settings:
    """Settings from the words of ``kvprobe audit``."""
    extra = {name: given[name] for name in ("alpha", "epsilon") if given[name] is not None}
    presets, bases = words(given["preset"]), words(given["base"])
    if not presets:
        raise EvictionError(f"no preset was given; allowed: {', '.join(PRESETS)}, or both")
    for kind, names in (("preset", presets), ("base", bases)):
        if len(set(names)) < len(names):
            raise EvictionError(f"{kind} {', '.join(names)}; allowed: each once")
    for base in bases:
        if SECOND_STAGE in base:
            raise EvictionError(f"base {base} has a second stage already; allowed: policies without one")
    pairs = tuple(
        pair for preset in presets for base in bases for pair in pairs_of(base, base + SECOND_STAGE, [preset], **extra)
    )
    return Settings(
        _distinct(pairs),
        words(given["cache"]),
        words(given["level"]),
        reading_from(given),
        words(given["sweep"]),
        words(given["sweep_cache"]),
        given["task"],
        given["items"],
        given["setting"],
        given["norm"],
        given["seed"],
    )


def _distinct(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Policies that do not pool are the same under every preset: once is enough."""
    seen: dict[Any, Pair] = {}
    for pair in pairs:
        seen.setdefault((pair.preset, pair.base.name), pair)
    return tuple(seen.values())


def _some(kind: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    if not given or len(set(given)) < len(given) or not set(given) <= set(allowed):
        raise EvictionError(f"{kind} {', '.join(map(str, given)) or 'none'}; allowed: {', '.join(allowed)}, each once")

"""Everything about a map that is decided before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprobe import cells
from kvprobe.cells.pairs import Pair, pairs_of
from kvprobe.cells.reading import Reading
from kvprobe.cells.reading import from_command as reading_from
from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.compose import settings_of
from kvprobe.eviction.policies import ratio
from kvprobe.inputs import words
from kvprobe.maps.tables import CACHES, MEASURES, fitting_caches
from kvprobe.tasks.document import Document
from kvprobe.theory.checks import check_p


@dataclass(frozen=True)
class Settings:
    """Decided before a run, and stored with it.

    Attributes
    ----------
    pairs
        What is compared, usually the same two policies under several presets; the first one is the main one.
    cache
        Share of the cache for the maps of heads and layers, as written.
    budgets
        Shares for the curve over sizes; None: those of :data:`kvprobe.maps.CACHES` that the policies can do.
    reading
        The documents and the probe.
    measure
        What a layer's perturbation is of, one of :data:`kvprobe.maps.MEASURES`.
    norm
        p of L and of the bounds.
    seed
        Of the resampling behind intervals.
    """

    pairs: tuple[Pair, ...]
    cache: str = "0.2"
    budgets: tuple[str, ...] | None = None
    reading: Reading = field(default_factory=Reading)
    measure: str = "attn_out"
    norm: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_p(self.norm)
        if self.measure not in tuple(MEASURES):
            raise EvictionError(f"measure={quote(self.measure)}; allowed: {', '.join(MEASURES)}")
        presets = [pair.preset for pair in self.pairs]
        if not self.pairs or len(set(presets)) < len(presets):
            raise EvictionError(f"presets {', '.join(presets) or 'none'}; allowed: one or more, each once")
        if self.budgets is not None and not self.budgets:
            raise EvictionError("no budget was given; allowed: one or more shares, or None for the usual ones")
        for share in (self.cache, *(self.budgets or ())):
            ratio(share)

    def caches(self, model: Any, n: int, behind: int = 1) -> tuple[list[str], list[str]]:
        """Sizes of the curve for contexts of ``n`` tokens or more, and those of the usual ones left out.

        Where none of the usual ones fits, the curve is the main size alone.
        """
        if self.budgets is not None:
            return list(self.budgets), []
        kept = fitting_caches(model, n, behind, self.arms) or [self.cache]
        return kept, [share for share in CACHES if share not in kept]

    def arms(self, caches: Sequence[str]) -> list[cells.Arm]:
        """All policies of all pairs at these sizes."""
        return [arm for pair in self.pairs for arm in pair.arms(caches)]

    def refuse(self, model: Any, documents: Sequence[Document]) -> None:
        """Refuse everything that can be refused before anything is computed."""
        extent = cells.extent(model, documents, self.reading.probe)
        cells.refuse(model, *extent, self.arms([self.cache]))
        if self.budgets is not None:
            cells.refuse(model, *extent, self.arms(self.budgets))


def from_command(given: Mapping[str, Any]) -> Settings:
    """Settings from the words of ``kvprobe map``."""
    names = (given["policy"], given["against"])
    extra = {name: given[name] for name in ("alpha", "epsilon") if given[name] is not None}
    _used(extra, names)
    pairs = pairs_of(*names, words(given["preset"]), **extra)
    budgets = None if given["budgets"] is None else words(given["budgets"])
    cache = given["cache"].strip()
    return Settings(pairs, cache, budgets, reading_from(given), given["measure"], given["norm"], given["seed"])


def _used(extra: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse a setting that neither policy has (``epsilon`` is stage 2's alone)."""
    has = {name for each in names for name in settings_of(each)}
    for name in extra:
        if "alpha" not in has:
            raise EvictionError(f"neither {' nor '.join(names)} has the setting {name}; allowed: with a second stage")

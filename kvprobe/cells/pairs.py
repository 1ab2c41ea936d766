"""Two policies side by side, and their tables as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from kvprobe import eviction
from kvprobe.cells.measuring import Arm
from kvprobe.errors import EvictionError, quote
from kvprobe.eviction import Policy
from kvprobe.eviction.compose import PRESETS, settings_of

AS_GIVEN = "as given"
"""The preset of policies that bring their own settings."""
COLUMNS = {"perturbation": "L", "bound": "bound", "centred_bound": "centred", "mass": "mass"}
"""Column of the cells → its name beside ``_base`` and ``_ours``."""


@dataclass(frozen=True)
class Pair:
    """A policy and the one that is held against it.

    Attributes
    ----------
    base, ours
        ``reduced`` and ``lower`` mean: ``ours`` perturbs less than ``base``.
    preset
        The pooling that both were made with, for tables.
    """

    base: Policy
    ours: Policy
    preset: str = AS_GIVEN

    def __post_init__(self) -> None:
        for each in (self.base, self.ours):
            if not isinstance(each, Policy):
                raise EvictionError(f"{quote(each)} is no policy; allowed: a name, or what eviction.policy(…) returns")
        if self.base.name == self.ours.name:
            raise EvictionError(
                f"{self.base.name} is held against itself; allowed: two policies with two names (label=… gives one)"
            )

    @classmethod
    def of(cls, base: Policy | str, ours: Policy | str, preset: str | None = None, **settings: Any) -> Pair:
        """A pair from names or objects; presets and settings go to those parts that have them."""
        if preset is None:
            return cls(_policy(base, settings), _policy(ours, settings))
        return cls(_policy(base, settings | {"preset": preset}), _policy(ours, settings | {"preset": preset}), preset)

    @property
    def policies(self) -> tuple[Policy, Policy]:
        """Both, under names that tell presets apart."""
        if self.preset == AS_GIVEN:
            return self.base, self.ours
        base, ours = (replace(each, label=f"{each.name} ({self.preset})") for each in (self.base, self.ours))
        return base, ours

    def arms(self, caches: Sequence[str]) -> list[Arm]:
        """Both policies at every cache size."""
        return [Arm(policy, cache) for policy in self.policies for cache in caches]

    def columns(self, table: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
        """A table with a row a policy as one with columns ``…_base`` and ``…_ours``."""
        keys = [key for key in ("doc", "layer", "head", "cache") if key in table]
        base, ours = (table[table["policy"] == policy.name].reset_index(drop=True) for policy in self.policies)
        assert base[keys].equals(ours[keys]), "both policies have the same rows in the same order"
        values = {
            f"{name}_{side}": part[column].to_numpy()
            for column, name in names.items()
            for side, part in (("base", base), ("ours", ours))
        }
        return base[keys].assign(**values)


def pairs_of(base: str, ours: str, presets: Sequence[str] = tuple(PRESETS), **settings: Any) -> tuple[Pair, ...]:
    """The same two policies under every preset; under none where neither of them pools."""
    for preset in presets:
        if preset not in PRESETS:
            raise EvictionError(f"preset={quote(preset)}; allowed: {', '.join(PRESETS)}")
    if not any({"pool", "kernel"} <= settings_of(name) for name in (base, ours)):
        return (Pair.of(base, ours, **settings),)
    return tuple(Pair.of(base, ours, preset, **settings) for preset in presets)


def _policy(given: Policy | str, settings: dict[str, Any]) -> Policy:
    if not isinstance(given, str):
        if settings:
            raise EvictionError(
                f"{quote(given)} has its settings already, {next(iter(settings))}= would be ignored; allowed: names "
                "with settings, or objects without"
            )
        return given
    has = settings_of(given)
    pools, stage2 = {"pool", "kernel"} <= has, {"alpha", "epsilon"} <= has
    allowed = (has & {"alpha"}) | ({"preset"} if pools else set()) | ({"epsilon", "p"} if stage2 else set())
    return eviction.policy(given, **{name: value for name, value in settings.items() if name in allowed})


def matrix(table: pd.DataFrame, column: str, keys: Sequence[str]) -> np.ndarray[Any, Any]:
    """A column as [documents, cells], cells in the order of ``keys``; every document has every cell once."""
    wide = table.pivot(index="doc", columns=list(keys), values=column).sort_index(axis=1)
    return wide.to_numpy(float)

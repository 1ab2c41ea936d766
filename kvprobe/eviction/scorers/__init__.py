"""Scorers: what is important. One file a method; a new one is one class handed to :func:`register`."""

from __future__ import annotations

from typing import TypeVar

from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.scorers.base import Scorer
from kvprobe.eviction.scorers.defensivekv import DefensiveKV
from kvprobe.eviction.scorers.expected_attention import ExpectedAttention
from kvprobe.eviction.scorers.h2o import H2O, H2O256
from kvprobe.eviction.scorers.knorm import Knorm
from kvprobe.eviction.scorers.obcache import OBCache
from kvprobe.eviction.scorers.oracle import Oracle
from kvprobe.eviction.scorers.random import Random
from kvprobe.eviction.scorers.snapkv import SnapKV
from kvprobe.eviction.scorers.streaming import Streaming
from kvprobe.eviction.scorers.tova import TOVA

__all__ = [
    "H2O",
    "H2O256",
    "SCORERS",
    "TOVA",
    "DefensiveKV",
    "ExpectedAttention",
    "Knorm",
    "OBCache",
    "Oracle",
    "Random",
    "Scorer",
    "SnapKV",
    "Streaming",
    "register",
]

_OURS: tuple[type[Scorer], ...] = (
    SnapKV,
    H2O,
    H2O256,
    TOVA,
    Streaming,
    Knorm,
    ExpectedAttention,
    DefensiveKV,
    OBCache,
    Random,
    Oracle,
)

SCORERS: dict[str, type[Scorer]] = {cls.name: cls for cls in _OURS}
"""Name → scorer."""

S = TypeVar("S", bound=type[Scorer])


def register(cls: S) -> S:
    """Add a scorer under its ``name``; usable as a decorator.

    Examples
    --------
    >>> @register
    ... @dataclass(frozen=True)
    ... class Longest(Scorer):
    ...     name = "longest"
    ...
    ...     def score(self, layer):
    ...         return layer.keys.float().norm(dim=-1)
    """
    if not (isinstance(cls, type) and issubclass(cls, Scorer)):
        raise EvictionError(f"{quote(cls)} is no scorer; allowed: a subclass of Scorer")
    name = cls.name
    if not isinstance(name, str) or not name or any(char.isspace() or char == "+" for char in name):
        raise EvictionError(f"{cls.__name__} has the name {quote(name)}; allowed: one word without '+'")
    if name in SCORERS:
        raise EvictionError(f"the name {quote(name)} is taken by {SCORERS[name].__name__}; allowed: a name of its own")
    SCORERS[name] = cls
    return cls

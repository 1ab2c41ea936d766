"""Budgets: how many entries every kept set holds.

A method is one small frozen dataclass; :func:`register` makes another one known by its name.
"""

from __future__ import annotations

from typing import TypeVar

from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.budgets.adakv import AdaKV
from kvprobe.eviction.budgets.base import Allocation, Budget, Request
from kvprobe.eviction.budgets.duo import Duo
from kvprobe.eviction.budgets.headkv import HeadKV
from kvprobe.eviction.budgets.layer_global import LayerGlobal
from kvprobe.eviction.budgets.profiles import HeadProfile, read_gates, read_profile, write_gates, write_profile
from kvprobe.eviction.budgets.pyramid import Pyramid
from kvprobe.eviction.budgets.uniform import Uniform

__all__ = [
    "BUDGETS",
    "AdaKV",
    "Allocation",
    "Budget",
    "Duo",
    "HeadKV",
    "HeadProfile",
    "LayerGlobal",
    "Pyramid",
    "Request",
    "Uniform",
    "read_gates",
    "read_profile",
    "register",
    "write_gates",
    "write_profile",
]

AnyBudget = TypeVar("AnyBudget", bound=type[Budget])

BUDGETS: dict[str, type[Budget]] = {cls.name: cls for cls in (Uniform, AdaKV, Pyramid, HeadKV, Duo, LayerGlobal)}
"""Name → class."""


def register(cls: AnyBudget) -> AnyBudget:
    """Make a budget known by its ``name``; usable as a decorator."""
    if not (isinstance(cls, type) and issubclass(cls, Budget)):
        raise EvictionError(f"{quote(cls)} is no budget; allowed: a subclass of Budget")
    if not cls.name or BUDGETS.get(cls.name, cls) is not cls:
        raise EvictionError(f"{cls.__name__} has name={quote(cls.name)}; allowed: a name not in {', '.join(BUDGETS)}")
    BUDGETS[cls.name] = cls
    return cls

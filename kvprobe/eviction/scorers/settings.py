"""Checks that the settings of several scorers share: each failure is one line."""

from __future__ import annotations

import math
from typing import Any

from kvprobe.errors import EvictionError, quote


def whole(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number ≥ ``least``; True is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise EvictionError(f"{name}={quote(value)}; allowed: a whole number ≥ {least}")


def number(name: str, value: Any, least: float, most: float = math.inf) -> None:
    """Refuse what is no finite number between ``least`` and ``most``."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not least <= value <= most:
        span = f"≥ {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise EvictionError(f"{name}={quote(value)}; allowed: a finite number {span}")


def choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse what is not among ``allowed``."""
    if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
        raise EvictionError(f"{name}={quote(value)}; allowed: {', '.join(map(str, allowed))}")

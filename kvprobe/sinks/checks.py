"""Is an argument of the kind that a function of this package takes?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvprobe.errors import KVProbeError, TheoryError, quote


def instance(value: Any, kind: type | tuple[type, ...], name: str, allowed: str) -> None:
    """Refuse a value of another class, in one line that says what is allowed."""
    if not isinstance(value, kind):
        raise TheoryError(f"{name}={quote(value)}; allowed: {allowed}")


def observed(trace: Any) -> None:
    """Refuse what is no trace (:class:`kvprobe.sinks.streaming.Observed`)."""
    if not all(hasattr(trace, name) for name in ("n", "n_layers", "n_heads", "queries", "pad", "layer")):
        raise TheoryError(f"trace={quote(trace)}; allowed: a Trace, such as kvprobe.observe returns")


def whole(value: Any, name: str, least: int, error: type[KVProbeError] = TheoryError) -> int:
    """A whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise error(f"{name}={quote(value)}; allowed: a whole number of at least {least}")
    return int(value)


def several(values: Any, name: str, what: str) -> Sequence[Any]:
    """A list of at least one value; a single number or a text is none."""
    if not isinstance(values, (Sequence, np.ndarray)) or isinstance(values, (str, bytes)) or not len(values):
        given = " is empty" if isinstance(values, (list, tuple)) else f"={quote(values)}"
        raise TheoryError(f"{name}{given}; allowed: {what}")
    return list(values)

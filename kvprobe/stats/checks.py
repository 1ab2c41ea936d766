"""What every statistic refuses: values that are not numbers, levels, seeds and counts out of range."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvprobe.errors import StatisticsError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Sums that differ by less than this share of the data's magnitude are equal: adding the same numbers in another order
# moves a float sum by about 1e-16 of it, and a tie split by rounding would make a p-value too small.
NOISE = 1e-12
TABLE = 4_000_000  # floats held at once by a chunk of draws (32 MB)


def numbers(values: ArrayLike, name: str, *, ndim: int | None = 1, finite: bool = True) -> Floats:
    """Values as float64, refused when NaN (or infinite, where sums are taken) or of the wrong number of axes."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise StatisticsError(f"{name} must be numbers, got {values!r:.80}") from error
    if ndim is not None and array.ndim != ndim:
        raise StatisticsError(f"{name} must have {ndim} axis(es), got shape {array.shape}")
    bad = ~np.isfinite(array) if finite else np.isnan(array)
    if bad.any():
        kind = "NaN or infinite" if finite else "NaN"
        raise StatisticsError(f"{name}: {int(bad.sum())} of {array.size} values are {kind}; drop and count them first")
    return array


def is_whole(value: object) -> bool:
    """True for a Python or numpy integer; a bool is not a number here."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check(level: float = 0.95, seed: int = 0, **counts: int) -> None:
    """Refuse a level outside (0, 1), a seed that is no integer >= 0, and any of `counts` that is no integer >= 1."""
    if not 0 < level < 1:
        raise StatisticsError(f"level={level!r}: allowed are 0 < level < 1")
    if not is_whole(seed) or seed < 0:
        raise StatisticsError(f"seed={seed!r}: allowed are integers >= 0 (a result must be reproducible)")
    for name, count in counts.items():
        if not is_whole(count) or count < 1:
            raise StatisticsError(f"{name}={count!r}: allowed are integers >= 1")


def identical(columns: Floats) -> Bools:
    """Which columns of [n, H] hold one value only, up to rounding of their largest."""
    return np.asarray(np.ptp(columns, axis=0) <= NOISE * np.abs(columns).max(axis=0))

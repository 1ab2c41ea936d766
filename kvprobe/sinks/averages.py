"""Means over inputs, the unit of every interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvprobe import stats

ANY = (-np.inf, np.inf)
POSITIVE = (0.0, np.inf)
"""Range of all that is measured here but shares and differences: masses of a bucket are sums, which may exceed 1."""
BOUNDS = {"share": (0.0, 1.0), "mass_per_token": (0.0, 1.0), "share_change": (-1.0, 1.0), "output_change": ANY}
"""Range of a measure of a bucket, where it is not :data:`POSITIVE`."""


def mean_of(
    values: Sequence[float],
    seed: int,
    interval: Callable[..., stats.Interval] = stats.mean_interval,
    bounds: tuple[float, float] = ANY,
) -> dict[str, Any]:
    """Mean over inputs with its interval (None below two inputs); undefined values are left out and counted.

    Parameters
    ----------
    bounds
        Range of the quantity, to which the interval is clipped: a t-interval of two inputs would leave it.

    Returns
    -------
    dict
        ``mean`` (None where nothing is left), ``ci_low``, ``ci_high``, ``n``, ``excluded``, ``ci_method``.
    """
    finite = [float(value) for value in values if np.isfinite(value)]
    if not finite:
        return {"mean": None, "ci_low": None, "ci_high": None, "n": 0, "excluded": len(values), "ci_method": None}
    found = interval(finite, seed=seed)
    low, high = (float(np.clip(end, *bounds)) if np.isfinite(end) else None for end in (found.low, found.high))
    return {
        "mean": found.mean,
        "ci_low": low,
        "ci_high": high,
        "n": found.n,
        "excluded": len(values) - found.n,
        "ci_method": found.method,
    }

"""The frozen results of the statistics, each of which can be written to a manifest."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvprobe.stats.checks import Bools, Floats


class Record:
    """A frozen dataclass that can be written to a manifest."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain Python values (arrays and tuples become lists, nested results become dicts)."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


@dataclass(frozen=True)
class Interval(Record):
    """A mean over items with its confidence interval.

    `method` says how low and high were made, `beside` is the same interval by the other method. `degenerate` is True
    where the interval must not be read as precision: fewer than two items (low and high NaN), identical values
    (zero width), or an undefined BCa.
    """

    mean: float
    low: float
    high: float
    n: int
    method: str
    beside: Interval | None = None
    degenerate: bool = False
    level: float = 0.95
    seed: int | None = None
    resamples: int | None = None


@dataclass(frozen=True)
class ItemAuroc(Record):
    """Within-item AUROCs of the items that hold both classes; `kept` are their positions in the input."""

    values: Floats
    kept: NDArray[np.int64]
    n: int
    n_excluded: int


@dataclass(frozen=True)
class TestResult(Record):
    """A two-sided test over items. `cannot_reject_at` is True if p could not have been <= 0.05 whatever was observed.

    `n` counts the items used, `n_excluded` those with one class only, `n_zero` zero differences (sign tests);
    `degenerate` flags data for which every assignment gives the same |statistic| (p is then 1).
    """

    __test__ = False  # not a test class, whatever its name makes pytest believe

    statistic: float
    p: float
    p_attainable: float
    n: int
    exact: bool
    method: str
    cannot_reject_at: bool
    n_excluded: int = 0
    n_zero: int = 0
    degenerate: bool = False
    seed: int | None = None
    draws: int | None = None


@dataclass(frozen=True, eq=False)
class MaxTResult(Record):
    """A family of heads under one joint permutation. Arrays are [heads].

    `statistic` is the mean over items (AUROC uncentred), `z` the centred one over its permutation standard deviation,
    `p` the single-step max-|T| adjusted p, `p_unadjusted` the head's own. `degenerate` heads (no variation within any
    item) have z = 0, p = 1.
    """

    statistic: Floats
    z: Floats
    p: Floats
    p_unadjusted: Floats
    degenerate: Bools
    p_attainable: float
    n: int
    exact: bool
    method: str
    cannot_reject_at: bool
    n_excluded: int = 0
    seed: int | None = None
    draws: int | None = None

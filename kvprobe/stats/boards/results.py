"""What a board's measures return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvprobe.stats.records import Interval, Record


@dataclass(frozen=True)
class BoardResult(Record):
    """A measure of one score on one board.

    `n` items were used (`items`, with their `values`; `n_rollouts` rollouts), `n_excluded` left out; `n_single_class`
    hold only right or only wrong rollouts. `score` names what ranked the rollouts and in which direction. A pooled
    result is one value (n = 1) without an interval.
    """

    measure: str
    value: float
    interval: Interval
    n: int
    n_excluded: int
    n_single_class: int
    n_rollouts: int
    score: str
    pooled: bool
    items: tuple[Any, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class LengthStrata(Record):
    """Within-item AUROC by length: `strata[s]` holds edges[s] < length <= edges[s + 1] (the first includes its edge).

    `adjusted` compares only rollouts of the same item and stratum: per item sum_s U_s / sum_s P_s N_s.
    """

    edges: tuple[float, ...]
    strata: tuple[BoardResult, ...]
    adjusted: BoardResult

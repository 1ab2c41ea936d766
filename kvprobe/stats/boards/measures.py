"""Measures of a board: the mean over items of a within-item measure, with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvprobe.errors import StatisticsError
from kvprobe.stats.boards.results import BoardResult
from kvprobe.stats.boards.rollouts import COLUMNS, Item, checked, items_of
from kvprobe.stats.boards.within import item_aurc, item_auroc, item_e_aurc, item_hit
from kvprobe.stats.checks import Bools, Floats, is_whole
from kvprobe.stats.intervals import auroc_interval, clopper_pearson
from kvprobe.stats.records import Interval

if TYPE_CHECKING:
    import pandas as pd


def measure(
    items: list[Item], name: str, of_item: Callable[[Bools, Floats], float], score: str, *, pooled: bool, **how: Any
) -> BoardResult:
    """Mean of a within-item measure over the items with both classes, or the one pooled value."""
    live = [item for item in items if not item.single_class]
    values = tuple(of_item(item.label, item.score) for item in live)
    interval = auroc_interval(values, **how)  # any measure in [0, 1]
    if pooled:
        method, level = "none: pooled over items, rollouts are not independent", interval.level
        interval = Interval(interval.mean, math.nan, math.nan, len(live), method, None, True, level)
    single, rollouts = len(items) - len(live), sum(item.label.size for item in live)
    names = tuple(item.name for item in live)
    return BoardResult(name, interval.mean, interval, len(live), single, single, rollouts, score, pooled, names, values)


MEASURES: dict[str, Callable[[Bools, Floats], float]] = {
    "auroc": item_auroc,
    "aurc": item_aurc,
    "e_aurc": item_e_aurc,
}


def _by_score(board: pd.DataFrame, name: str, *, pooled: bool, **how: Any) -> BoardResult:
    if not isinstance(pooled, bool):
        raise StatisticsError(f"pooled={pooled!r}: allowed are True, False")
    items = items_of(checked(board, COLUMNS, pooled=pooled), pooled=pooled)
    return measure(items, name, MEASURES[name], "score", pooled=pooled, **how)


def board_auroc(
    board: pd.DataFrame, *, pooled: bool = False, level: float = 0.95, seed: int = 0, resamples: int = 9999
) -> BoardResult:
    """Mean over items of the within-item AUROC of `score` for `label`, ties 1/2.

    Items with one class only are excluded and counted. `pooled=True` ranks all rollouts together (`item` may then be
    absent) and gives no interval. Raises StatisticsError for missing columns, non-binary labels, NaN scores, repeated
    rollouts.
    """
    return _by_score(board, "auroc", pooled=pooled, level=level, seed=seed, resamples=resamples)


def aurc(
    board: pd.DataFrame, *, pooled: bool = False, level: float = 0.95, seed: int = 0, resamples: int = 9999
) -> BoardResult:
    """Area under the risk-coverage curve, (1/n) sum_k R_k, mean over items; lower is better.

    R_k = (1/k) sum_{j <= k} (1 - label_(j)), rollouts by falling score; tied scores enter in expected order, i.e. each
    rank of a tied block carries the block's mean error. Single-class items (their value does not depend on the score)
    are excluded and counted, as in `board_auroc`. Source: Geifman, Uziel & El-Yaniv 2019 (arXiv 1805.08206).
    """
    return _by_score(board, "aurc", pooled=pooled, level=level, seed=seed, resamples=resamples)


def e_aurc(
    board: pd.DataFrame, *, pooled: bool = False, level: float = 0.95, seed: int = 0, resamples: int = 9999
) -> BoardResult:
    """Excess AURC: `aurc` minus that of the oracle that ranks all right rollouts first; 0 is best, mean over items.

    The oracle is the exact finite sum with the item's own number of errors, not the source's integral
    r + (1 - r) ln(1 - r). Single-class items, where it is 0 for every score, are excluded and counted.
    """
    return _by_score(board, "e_aurc", pooled=pooled, level=level, seed=seed, resamples=resamples)


def acc_at_k(board: pd.DataFrame, k: int, *, level: float = 0.95, seed: int = 0, resamples: int = 9999) -> BoardResult:
    """Share of items whose k highest-scored rollouts hold a correct one; ties: exact expectation over random order.

    All items count, single-class ones too (an item without a right rollout is a miss): leaving them out would change
    the share. Interval: Clopper-Pearson when every item is 0 or 1, else as for AUROC. Raises StatisticsError when an
    item has fewer than k rollouts.
    """
    return hits(items_of(checked(board, COLUMNS)), k, "score", level=level, seed=seed, resamples=resamples)


def hits(items: list[Item], k: int, score: str, **how: Any) -> BoardResult:
    """acc@k of items that are ranked by `score`, and its interval (`how`: level, seed, resamples)."""
    least = min((item.label.size for item in items), default=1)
    if not is_whole(k) or not 1 <= k <= least:
        raise StatisticsError(f"k={k!r}: allowed are integers 1 to {least}, the fewest rollouts of an item")
    values = tuple(item_hit(item.label, item.score, int(k)) for item in items)
    whole = all(v in (0.0, 1.0) for v in values)
    interval = clopper_pearson(int(sum(values)), len(values), how["level"]) if whole else auroc_interval(values, **how)
    single, rollouts = sum(item.single_class for item in items), sum(item.label.size for item in items)
    names = tuple(item.name for item in items)
    return BoardResult(
        f"acc@{k}", interval.mean, interval, len(items), 0, single, rollouts, score, False, names, values
    )

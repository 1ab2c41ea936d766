"""Boards of repeated rollouts: does a score tell an item's right rollouts from its wrong ones?

A board is a DataFrame with columns `item`, `rollout`, `label` (1 = correct), `score` (higher = more confident) and,
for the length baseline and strata, `length`. Every measure is computed within the item and averaged over items, which
are what the interval resamples. Pooling rollouts of several items mixes "harder item" with "worse rollout" (Simpson's
paradox) and must be asked for by name. Eviction scores have neither rollouts nor a binary outcome: refused here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvprobe.errors import StatisticsError
from kvprobe.stats import Floats, Interval, Record, auroc, auroc_interval, clopper_pearson

if TYPE_CHECKING:
    import pandas as pd

Direction = Literal["shorter", "longer"]
Bools = NDArray[np.bool_]
_COLUMNS = ("item", "rollout", "label", "score")


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


@dataclass(frozen=True)
class _Item:
    name: Any
    label: Bools
    score: Floats

    @property
    def single_class(self) -> bool:
        return bool(self.label.all() or not self.label.any())


# ---------------------------------------------------------------------------------------------------------- input


def _checked(board: pd.DataFrame, need: tuple[str, ...], *, pooled: bool = False) -> pd.DataFrame:
    """The needed columns with label as bool and numbers as float64; anything else is refused."""
    import pandas as pd

    if not isinstance(board, pd.DataFrame):
        raise StatisticsError(f"board is a {type(board).__name__}: allowed is a DataFrame with columns {_COLUMNS}")
    needed = [c for c in need if not (pooled and c == "item")]
    missing = [c for c in needed if c not in board.columns]
    if missing:
        hint = " (pooling over items is refused unless asked for as pooled=True)" if "item" in missing else ""
        raise StatisticsError(f"board lacks {missing}; given {list(board.columns)}, needed {needed}{hint}")
    table = board[needed].reset_index(drop=True)
    if table.empty:
        raise StatisticsError(f"board has no rows; needed are rows of {needed}")
    if len(table.columns) != len(needed):
        raise StatisticsError(f"board repeats a column among {needed}; given {list(board.columns)}")
    for name in ("item", "rollout"):
        if name in needed and table[name].isna().any():
            raise StatisticsError(f"column {name!r} has {int(table[name].isna().sum())} missing values; allowed none")
    if "item" in needed and table.duplicated(["item", "rollout"]).any():
        first = table.loc[table.duplicated(["item", "rollout"]), ["item", "rollout"]].iloc[0].tolist()
        raise StatisticsError(f"rollout given twice (item, rollout) = {first}: allowed is one row each")
    table["label"] = _labels(table["label"])
    for name in ("score", "length"):
        if name in needed:
            table[name] = _column(table[name], name)
    return table


def _labels(column: pd.Series) -> Bools:
    binary = (bool, int, float, np.number, np.bool_)
    wrong = [v for v in column.tolist() if not (isinstance(v, binary) and v in (0, 1))]
    if wrong:
        raise StatisticsError(f"column 'label' holds {wrong[:5]!r:.80}: allowed are 0/1 or False/True, none missing")
    return np.asarray(column.astype(bool), dtype=np.bool_)


def _column(column: pd.Series, name: str) -> Floats:
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(column):
        raise StatisticsError(f"column {name!r} has dtype {column.dtype}: allowed are numbers")
    values = np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan))
    bad = np.isnan(values) if name == "score" else ~np.isfinite(values) | (values < 0)
    if bad.any():
        rule = "numbers, not NaN" if name == "score" else "finite numbers >= 0"
        raise StatisticsError(f"column {name!r} has {int(bad.sum())} of {len(values)} values not allowed: {rule}")
    return values


def _items(table: pd.DataFrame, *, pooled: bool = False) -> list[_Item]:
    if pooled:
        return [_Item("pooled", table["label"].to_numpy(), table["score"].to_numpy())]
    groups = table.groupby("item", sort=False, observed=True)
    return [_Item(name, group["label"].to_numpy(), group["score"].to_numpy()) for name, group in groups]


# --- measures of one item


def _item_auroc(label: Bools, score: Floats) -> float:
    return auroc(score[label], score[~label])


def _item_aurc(label: Bools, score: Floats) -> float:
    """Mean over k of the expected error rate among the k highest scores, tied scores in random order."""
    _, place, size = np.unique(-score, return_inverse=True, return_counts=True)
    errors = np.bincount(place, weights=~label) / size  # a tied block's expected error at each of its ranks
    return float(np.mean(np.cumsum(np.repeat(errors, size)) / np.arange(1, label.size + 1)))


def _item_e_aurc(label: Bools, score: Floats) -> float:
    return max(0.0, _item_aurc(label, score) - _item_aurc(label, label.astype(np.float64)))  # rounding may dip below


def _item_hit(label: Bools, score: Floats, k: int) -> float:
    """P(the top k hold a correct rollout) over random order of tied scores: hypergeometric in the block at the cut."""
    cut = np.sort(score)[-k]
    if label[score > cut].any():
        return 1.0
    tied, right, room = int((score == cut).sum()), int(label[score == cut].sum()), k - int((score > cut).sum())
    return 1 - math.comb(tied - right, room) / math.comb(tied, room)


# ------------------------------------------------------------------------------------------------------ measures


def _measure(
    items: list[_Item], name: str, of_item: Callable[[Bools, Floats], float], score: str, *, pooled: bool, **how: Any
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


_MEASURES: dict[str, Callable[[Bools, Floats], float]] = {
    "auroc": _item_auroc,
    "aurc": _item_aurc,
    "e_aurc": _item_e_aurc,
}


def _by_score(board: pd.DataFrame, name: str, *, pooled: bool, **how: Any) -> BoardResult:
    if not isinstance(pooled, bool):
        raise StatisticsError(f"pooled={pooled!r}: allowed are True, False")
    items = _items(_checked(board, _COLUMNS, pooled=pooled), pooled=pooled)
    return _measure(items, name, _MEASURES[name], "score", pooled=pooled, **how)


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
    return _hits(_items(_checked(board, _COLUMNS)), k, "score", level=level, seed=seed, resamples=resamples)


def _hits(items: list[_Item], k: int, score: str, **how: Any) -> BoardResult:
    least = min((item.label.size for item in items), default=1)
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= least:
        raise StatisticsError(f"k={k!r}: allowed are integers 1 to {least}, the fewest rollouts of an item")
    values = tuple(_item_hit(item.label, item.score, int(k)) for item in items)
    whole = all(v in (0.0, 1.0) for v in values)
    interval = clopper_pearson(int(sum(values)), len(values), how["level"]) if whole else auroc_interval(values, **how)
    single, rollouts = sum(item.single_class for item in items), sum(item.label.size for item in items)
    names = tuple(item.name for item in items)
    return BoardResult(
        f"acc@{k}", interval.mean, interval, len(items), 0, single, rollouts, score, False, names, values
    )


# --------------------------------------------------------------------------------------------------------- length


def length_baseline(
    board: pd.DataFrame,
    k: int = 1,
    direction: Direction = "shorter",
    *,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = 9999,
) -> dict[str, BoardResult]:
    """The same measures ("auroc", "aurc", "e_aurc", "acc@k") with length in the score's place; `score` is not read.

    `direction="shorter"` ranks by -length (short rollouts trusted most), "longer" by +length; it is stored in each
    result's `score`. Choose it before looking: taking the better of the two is a fitted baseline.
    """
    if direction not in ("shorter", "longer"):
        raise StatisticsError(f"direction={direction!r}: allowed are 'shorter' (-length), 'longer' (+length)")
    table = _checked(board, ("item", "rollout", "label", "length"))
    sign, name = (-1, "-length") if direction == "shorter" else (1, "+length")
    items, how = _items(table.assign(score=sign * table["length"])), {"level": level, "seed": seed}
    results = [_measure(items, m, f, name, pooled=False, resamples=resamples, **how) for m, f in _MEASURES.items()]
    return {r.measure: r for r in [*results, _hits(items, k, name, resamples=resamples, **how)]}


def length_strata(
    board: pd.DataFrame, n_strata: int = 3, *, level: float = 0.95, seed: int = 0, resamples: int = 9999
) -> LengthStrata:
    """Within-item AUROC of `score` among rollouts of like length, per stratum and adjusted over all strata.

    Strata are quantiles of length over the whole board, so that one means the same for every item; equal lengths share
    a stratum, hence there may be fewer than asked. Items with rollouts of one class in a stratum are excluded there,
    items that no stratum can use from `adjusted`; both are counted.
    """
    if isinstance(n_strata, bool) or not isinstance(n_strata, (int, np.integer)) or n_strata < 1:
        raise StatisticsError(f"n_strata={n_strata!r}: allowed are integers >= 1")
    table, how = _checked(board, (*_COLUMNS, "length")), {"level": level, "seed": seed, "resamples": resamples}
    length = table["length"].to_numpy()
    upper = np.unique(np.quantile(length, np.arange(1, n_strata + 1) / n_strata, method="inverted_cdf"))
    stratum = np.searchsorted(upper, length, "left")  # right-closed: equal lengths stay together
    cells = [_items(table[stratum == s]) for s in range(len(upper))]
    strata = tuple(_measure(cell, "auroc", _item_auroc, "score", pooled=False, **how) for cell in cells)
    return LengthStrata((float(length.min()), *upper.tolist()), strata, _adjusted(table, cells, how))


def _adjusted(table: pd.DataFrame, cells: list[list[_Item]], how: dict[str, Any]) -> BoardResult:
    """Per item, AUROC over the pairs within strata only: pair-weighted mean of the strata's AUROCs."""
    pairs: dict[Any, Floats] = {name: np.zeros(2) for name in table["item"].unique()}  # U, P N
    for item in (item for cell in cells for item in cell if not item.single_class):
        weight = item.label.sum() * (~item.label).sum()
        pairs[item.name] += (_item_auroc(item.label, item.score) * weight, weight)
    names = tuple(name for name, (_, weight) in pairs.items() if weight)
    values = tuple(float(pairs[name][0] / pairs[name][1]) for name in names)
    interval, out = auroc_interval(values, **how), len(pairs) - len(names)
    single = sum(item.single_class for item in _items(table))
    used = sum(item.label.size for cell in cells for item in cell if not item.single_class)
    return BoardResult(
        "auroc within length strata", interval.mean, interval, len(names), out, single, used, "score", False, names,
        values,
    )  # fmt: skip

"""What rollout length alone would tell: length in the score's place, and the score among rollouts of like length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvprobe.errors import StatisticsError
from kvprobe.stats.boards.measures import MEASURES, hits, measure
from kvprobe.stats.boards.results import BoardResult, LengthStrata
from kvprobe.stats.boards.rollouts import COLUMNS, Item, checked, items_of
from kvprobe.stats.boards.within import item_auroc
from kvprobe.stats.checks import Floats, check
from kvprobe.stats.intervals import auroc_interval

if TYPE_CHECKING:
    import pandas as pd

Direction = Literal["shorter", "longer"]


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
    table = checked(board, ("item", "rollout", "label", "length"))
    sign, name = (-1, "-length") if direction == "shorter" else (1, "+length")
    items, how = items_of(table.assign(score=sign * table["length"])), {"level": level, "seed": seed}
    results = [measure(items, m, f, name, pooled=False, resamples=resamples, **how) for m, f in MEASURES.items()]
    return {r.measure: r for r in [*results, hits(items, k, name, resamples=resamples, **how)]}


def length_strata(
    board: pd.DataFrame, n_strata: int = 3, *, level: float = 0.95, seed: int = 0, resamples: int = 9999
) -> LengthStrata:
    """Within-item AUROC of `score` among rollouts of like length, per stratum and adjusted over all strata.

    Strata are quantiles of length over the whole board, so that one means the same for every item; equal lengths share
    a stratum, hence there may be fewer than asked. Items with rollouts of one class in a stratum are excluded there,
    items that no stratum can use from `adjusted`; both are counted.
    """
    check(n_strata=n_strata)
    table, how = checked(board, (*COLUMNS, "length")), {"level": level, "seed": seed, "resamples": resamples}
    length = table["length"].to_numpy()
    upper = np.unique(np.quantile(length, np.arange(1, n_strata + 1) / n_strata, method="inverted_cdf"))
    stratum = np.searchsorted(upper, length, "left")  # right-closed: equal lengths stay together
    cells = [items_of(table[stratum == s]) for s in range(len(upper))]
    strata = tuple(measure(cell, "auroc", item_auroc, "score", pooled=False, **how) for cell in cells)
    return LengthStrata((float(length.min()), *upper.tolist()), strata, _adjusted(table, cells, how))


def _adjusted(table: pd.DataFrame, cells: list[list[Item]], how: dict[str, Any]) -> BoardResult:
    """Per item, AUROC over the pairs within strata only: pair-weighted mean of the strata's AUROCs."""
    pairs: dict[Any, Floats] = {name: np.zeros(2) for name in table["item"].unique()}  # U, P N
    for item in (item for cell in cells for item in cell if not item.single_class):
        weight = item.label.sum() * (~item.label).sum()
        pairs[item.name] += (item_auroc(item.label, item.score) * weight, weight)
    names = tuple(name for name, (_, weight) in pairs.items() if weight)
    values = tuple(float(pairs[name][0] / pairs[name][1]) for name in names)
    interval, out = auroc_interval(values, **how), len(pairs) - len(names)
    single = sum(item.single_class for item in items_of(table))
    used = sum(item.label.size for cell in cells for item in cell if not item.single_class)
    return BoardResult(
        "auroc within length strata", interval.mean, interval, len(names), out, single, used, "score", False, names,
        values,
    )  # fmt: skip

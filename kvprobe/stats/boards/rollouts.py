"""A board checked and cut into items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.errors import StatisticsError
from kvprobe.stats.checks import Bools, Floats

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("item", "rollout", "label", "score")


@dataclass(frozen=True)
class Item:
    """The rollouts of one item: label [rollouts], True = right, and score [rollouts]."""

    name: Any
    label: Bools
    score: Floats

    @property
    def single_class(self) -> bool:
        """True if all rollouts are right or all are wrong."""
        return bool(self.label.all() or not self.label.any())


def checked(board: pd.DataFrame, need: tuple[str, ...], *, pooled: bool = False) -> pd.DataFrame:
    """The needed columns with label as bool and numbers as float64; anything else is refused."""
    table = _selected(board, [c for c in need if not (pooled and c == "item")])
    _refuse_unnamed(table)
    table["label"] = _labels(table["label"])
    for name in ("score", "length"):
        if name in table:
            table[name] = _column(table[name], name)
    return table


def _selected(board: pd.DataFrame, needed: list[str]) -> pd.DataFrame:
    """The needed columns, each there once, of a board with rows."""
    import pandas as pd

    if not isinstance(board, pd.DataFrame):
        raise StatisticsError(f"board is a {type(board).__name__}: allowed is a DataFrame with columns {COLUMNS}")
    missing = [c for c in needed if c not in board.columns]
    if missing:
        hint = " (pooling over items is refused unless asked for as pooled=True)" if "item" in missing else ""
        raise StatisticsError(f"board lacks {missing}; given {list(board.columns)}, needed {needed}{hint}")
    table = board[needed].reset_index(drop=True)
    if table.empty:
        raise StatisticsError(f"board has no rows; needed are rows of {needed}")
    if len(table.columns) != len(needed):
        raise StatisticsError(f"board repeats a column among {needed}; given {list(board.columns)}")
    return table


def _refuse_unnamed(table: pd.DataFrame) -> None:
    """Every row must say which rollout of which item it is, and none may say it twice."""
    for name in ("item", "rollout"):
        if name in table and table[name].isna().any():
            raise StatisticsError(f"column {name!r} has {int(table[name].isna().sum())} missing values; allowed none")
    if "item" in table and table.duplicated(["item", "rollout"]).any():
        first = table.loc[table.duplicated(["item", "rollout"]), ["item", "rollout"]].iloc[0].tolist()
        raise StatisticsError(f"rollout given twice (item, rollout) = {first}: allowed is one row each")


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


def items_of(table: pd.DataFrame, *, pooled: bool = False) -> list[Item]:
    """The items of a checked board in order of appearance; pooled, one item that holds every rollout."""
    if pooled:
        return [Item("pooled", table["label"].to_numpy(), table["score"].to_numpy())]
    groups = table.groupby("item", sort=False, observed=True)
    return [Item(name, group["label"].to_numpy(), group["score"].to_numpy()) for name, group in groups]

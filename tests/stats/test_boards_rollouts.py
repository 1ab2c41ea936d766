"""What a board may hold, and how a mistake is quoted."""

import numpy as np
import pandas as pd
import pytest
from rollout_boards import MEASURES, random_board

from kvprobe.errors import StatisticsError
from kvprobe.stats import boards


@pytest.mark.parametrize(("change", "quote"), [
    (lambda t: t.drop(columns="rollout"), "lacks ['rollout']; given ['item', 'label', 'score', 'length']"),
    (lambda t: t.drop(columns=["label", "score"]), "lacks ['label', 'score']"),
    (lambda t: t.assign(label=t["label"] + 1), "holds [2"),
    (lambda t: t.assign(label=t["label"] * 0.5), "0.5"),
    (lambda t: t.assign(label="yes"), "'yes'"),
    (lambda t: t.assign(label=pd.array([None] + [1] * (len(t) - 1), dtype="Int64")), "NA"),
    (lambda t: t.assign(label=np.where(t.index == 0, np.nan, 1.0)), "nan"),
    (lambda t: t.assign(label=[[1]] * len(t)), "[[1]"),
    (lambda t: t.assign(score=np.where(t.index < 2, np.nan, 0.0)), "2 of 96"),
    (lambda t: t.assign(score="high"), "'score' has dtype"),
    (lambda t: t.assign(rollout=0), "given twice"),
    (lambda t: t.assign(item=np.where(t.index == 0, None, t["item"])), "'item' has 1 missing"),
    (lambda t: t.iloc[:0], "no rows"),
    (lambda t: t.to_dict(), "board is a dict"),
    (lambda t: t.set_axis(["item", "rollout", "label", "score", "score"], axis=1), "repeats a column"),
])  # fmt: skip
def test_mistakes_are_quoted(change, quote):
    table = change(random_board(0).astype({"label": int}))
    for measure in MEASURES:
        with pytest.raises(StatisticsError) as caught:
            measure(table)
        assert quote in str(caught.value)
    with pytest.raises(StatisticsError):
        boards.acc_at_k(table, 1)


def test_length_is_checked():
    table = random_board(0)
    for call in (boards.length_baseline, boards.length_strata):
        with pytest.raises(StatisticsError, match=r"lacks \['length'\]"):
            call(table.drop(columns="length"))
        with pytest.raises(StatisticsError, match="finite numbers >= 0"):
            call(table.assign(length=-1))
    for n in (0, 2.5, True):
        with pytest.raises(StatisticsError, match="n_strata"):
            boards.length_strata(table, n)
    for k in (0, 9, 1.0, True):
        with pytest.raises(StatisticsError, match="allowed are integers 1 to 8"):
            boards.acc_at_k(table, k)


@pytest.mark.parametrize("dtype", ["bool", "int64", "float32", "boolean", "Int8", "object"])
def test_binary_labels_of_any_dtype(dtype):
    table = random_board(9)
    assert boards.board_auroc(table.astype({"label": dtype})) == boards.board_auroc(table)

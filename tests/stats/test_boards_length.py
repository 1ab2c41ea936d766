"""Length in the score's place, and the score among rollouts of like length."""

import numpy as np
import pandas as pd
import pytest
from rollout_boards import board, random_board

from kvprobe.errors import StatisticsError
from kvprobe.stats import boards


def test_length_baseline_is_the_measure_of_length():
    table = random_board(5)
    for direction, sign, name in (("shorter", -1, "-length"), ("longer", 1, "+length")):
        base = boards.length_baseline(table, k=2, direction=direction)
        scored = table.assign(score=sign * table["length"].astype(float))
        assert base["auroc"].value == boards.board_auroc(scored).value
        assert base["aurc"].value == boards.aurc(scored).value
        assert base["e_aurc"].value == boards.e_aurc(scored).value
        assert base["acc@2"].value == boards.acc_at_k(scored, 2).value
        assert {r.score for r in base.values()} == {name}
    short, long = (boards.length_baseline(table, direction=d)["auroc"].value for d in ("shorter", "longer"))
    assert short == pytest.approx(1 - long)
    assert boards.length_baseline(table.drop(columns="score"))["auroc"].value == short
    with pytest.raises(StatisticsError, match="direction='both'"):
        boards.length_baseline(table, direction="both")


def test_length_strata_against_the_slow_way():
    table = random_board(6, items=15, rollouts=12)
    result = boards.length_strata(table, 3)
    assert len(result.strata) == 3
    assert len(result.edges) == 4
    length = table["length"]
    for s, stratum in enumerate(result.strata):
        inside = table[(length <= result.edges[s + 1]) & ((length > result.edges[s]) | (s == 0))]
        assert stratum.value == pytest.approx(boards.board_auroc(inside).value)
        assert stratum.n + stratum.n_excluded == inside["item"].nunique()
    above = np.digitize(length, result.edges[1:-1], right=True)
    for name, value in zip(result.adjusted.items, result.adjusted.values, strict=True):
        item = table[table["item"] == name].assign(s=above[table["item"] == name])
        pairs = [
            (a.score > b.score) + 0.5 * (a.score == b.score)
            for a in item[item["label"]].itertuples()
            for b in item[~item["label"]].itertuples()
            if a.s == b.s
        ]
        assert value == pytest.approx(np.mean(pairs))
    assert result.adjusted.n + result.adjusted.n_excluded == 15


def test_one_stratum_is_the_plain_auroc():
    table = random_board(7)
    result = boards.length_strata(table, 1)
    plain = boards.board_auroc(table)
    assert result.strata[0].value == plain.value
    assert result.adjusted.value == pytest.approx(plain.value)
    assert result.adjusted.n_excluded == plain.n_excluded == result.adjusted.n_single_class


def test_strata_remove_what_only_length_explains():
    """A score that is length itself, and length drives the label: AUROC high, adjusted over single lengths 1/2."""
    rng, rows = np.random.default_rng(8), []
    for i in range(30):
        length = rng.integers(1, 4, 40)
        rows += [(i, r, rng.random() < length[r] / 4, float(length[r]), length[r]) for r in range(40)]
    table = pd.DataFrame(rows, columns=["item", "rollout", "label", "score", "length"])
    assert boards.board_auroc(table).value > 0.6
    result = boards.length_strata(table, 3)
    assert result.adjusted.value == 0.5
    assert result.edges == (1, 1, 2, 3)


def test_equal_lengths_share_a_stratum():
    item = [(True, 1), (False, 0)] * 3
    lengths = [5, 5, 5, 5, 9, 9]
    result = boards.length_strata(board([item], lengths), 3)
    assert result.edges == (5, 5, 9)
    assert [s.n_rollouts for s in result.strata] == [4, 2]
    constant = boards.length_strata(board([item], 7), 4)
    assert constant.edges == (7, 7)
    assert len(constant.strata) == 1

"""Measures of a board: scikit-learn, all orders of ties, hand values, exclusions, pooling."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_boards import MEASURES, board, orders, random_board, slow_aurc

from kvprobe import stats
from kvprobe.errors import StatisticsError
from kvprobe.stats import boards

ROLLOUTS = st.lists(st.tuples(st.booleans(), st.integers(-2, 2)), min_size=1, max_size=6)
QUICK = settings(max_examples=40, deadline=None)


def test_auroc_is_sklearn_within_item():
    from sklearn.metrics import roc_auc_score

    table = random_board(0, integer=True)
    result = boards.board_auroc(table)
    groups = {name: g for name, g in table.groupby("item") if g["label"].nunique() == 2}
    for name, value in zip(result.items, result.values, strict=True):
        assert value == pytest.approx(roc_auc_score(groups[name]["label"], groups[name]["score"]))
    assert result.n == len(groups)
    assert result.n + result.n_excluded == 12
    assert result.value == pytest.approx(np.mean(result.values)) == result.interval.mean
    assert result.interval == stats.auroc_interval(result.values)


@QUICK
@given(ROLLOUTS.filter(lambda item: len({label for label, _ in item}) == 2))
def test_aurc_is_the_mean_over_all_orders_of_ties(item):
    table = board([item])
    value = boards.aurc(table).value
    assert value == pytest.approx(slow_aurc(item))
    oracle = slow_aurc([(label, float(label)) for label, _ in item])
    assert boards.e_aurc(table).value == pytest.approx(value - oracle, abs=1e-12)
    monotone = board([[(label, math.exp(score)) for label, score in item]])
    assert boards.aurc(monotone).value == value


@QUICK
@given(st.lists(ROLLOUTS, min_size=1, max_size=4), st.integers(1, 3))
def test_acc_at_k_is_the_mean_over_all_orders_of_ties(items, k):
    least = min(map(len, items))
    if k > least:
        with pytest.raises(StatisticsError, match=f"k={k}: allowed are integers 1 to {least}"):
            boards.acc_at_k(board(items), k)
        return
    result = boards.acc_at_k(board(items), k)
    slow = [np.mean([any(label for label, _ in p[:k]) for p in orders(item)]) for item in items]
    assert result.values == pytest.approx(slow)
    assert (result.n, result.n_excluded) == (len(items), 0)
    assert result.n_single_class == sum(len({label for label, _ in item}) == 1 for item in items)


def test_hand_values():
    item = [(True, 3), (False, 2), (True, 1), (False, 0)]  # risks 0, 1/2, 1/3, 1/2; oracle 0, 0, 1/3, 1/2
    table = board([item])
    assert boards.aurc(table).value == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 4)
    assert boards.e_aurc(table).value == pytest.approx(1 / 8)
    assert boards.board_auroc(table).value == 3 / 4
    perfect = board([[(True, 1), (False, 0), (False, -1)]])
    assert boards.e_aurc(perfect).value == 0
    tied = board([[(True, 1), (False, 1), (False, 1)]])
    assert boards.acc_at_k(tied, 1).value == pytest.approx(1 / 3)
    assert boards.acc_at_k(tied, 2).value == pytest.approx(2 / 3)
    assert boards.aurc(tied).value == pytest.approx(2 / 3)


def test_infinite_scores_only_order():
    table = board([[(True, np.inf), (False, 0), (False, -np.inf)]])
    assert boards.board_auroc(table).value == 1
    assert boards.e_aurc(table).value == 0
    assert boards.acc_at_k(table, 1).value == 1


def test_single_class_items_excluded_and_counted_but_kept_in_acc():
    mixed = [(True, 1), (False, 0)]
    table = board([mixed, [(True, 1), (True, 2)], [(False, 1), (False, 2)], mixed, mixed])
    for measure in MEASURES:
        result = measure(table)
        assert (result.n, result.n_excluded, result.n_single_class, result.n_rollouts) == (3, 2, 2, 6)
        assert result.items == (0, 3, 4)
    acc = boards.acc_at_k(table, 1)
    assert (acc.value, acc.n, acc.n_excluded, acc.n_single_class) == (0.8, 5, 0, 2)
    assert acc.interval == stats.clopper_pearson(4, 5)


def test_no_informative_item_is_flagged():
    result = boards.board_auroc(board([[(True, 1)], [(False, 1)]]))
    assert (result.n, result.n_excluded, result.interval.degenerate) == (0, 2, True)
    assert math.isnan(result.value)


@pytest.mark.parametrize("measure", MEASURES)
def test_order_of_rows_and_items_does_not_matter(measure):
    table = random_board(1)
    shuffled = measure(table.sample(frac=1, random_state=0))
    whole = measure(table)
    assert dict(zip(whole.items, whole.values, strict=True)) == dict(zip(shuffled.items, shuffled.values, strict=True))
    assert whole.value == pytest.approx(shuffled.value)


def test_complement_of_the_score():
    table = random_board(2, integer=True)
    flipped = table.assign(score=-table["score"])
    assert boards.board_auroc(table).value == pytest.approx(1 - boards.board_auroc(flipped).value)


def test_seed_level_and_input_are_respected():
    table = random_board(3)
    kept = table.copy()
    result = boards.board_auroc(table, level=0.9, seed=4, resamples=199)
    assert result.interval == stats.auroc_interval(result.values, 0.9, 4, 199)
    assert result == boards.board_auroc(table, level=0.9, seed=4, resamples=199)
    pd.testing.assert_frame_equal(table, kept)


def simpson():
    """Within every item the score misleads (AUROC 0); pooled it looks fine, because easy items score high."""
    easy = [(True, 10), (True, 11), (True, 12), (False, 13)]
    hard = [(True, 0), (False, 1), (False, 2), (False, 3)]
    return board([easy, hard])


def test_pooling_reverses_the_verdict_and_must_be_named():
    table = simpson()
    assert boards.board_auroc(table).value == 0
    pooled = boards.board_auroc(table, pooled=True)
    assert pooled.value > 0.5
    assert pooled.pooled
    assert pooled.n_rollouts == 8
    assert pooled.interval.degenerate
    assert math.isnan(pooled.interval.low)
    assert "pooled" in pooled.interval.method
    assert boards.board_auroc(table.drop(columns="item"), pooled=True).value == pooled.value
    for measure in MEASURES:
        with pytest.raises(StatisticsError, match=r"lacks \['item'\].*pooled=True"):
            measure(table.drop(columns="item"))
        with pytest.raises(TypeError):
            measure(table, True)
    with pytest.raises(StatisticsError, match="pooled='yes'"):
        boards.board_auroc(table, pooled="yes")


@pytest.mark.parametrize("measure", MEASURES)
def test_pooled_measure_is_that_of_one_item(measure):
    table = random_board(4, integer=True)
    one = measure(table.assign(item=0, rollout=range(len(table))))
    assert measure(table, pooled=True).value == one.value


def test_results_are_plain():
    table = random_board(10)
    json.dumps([boards.board_auroc(table).to_dict(), boards.length_strata(table).to_dict()])
    json.dumps(boards.acc_at_k(table, 2).to_dict())

"""Laws and oracles of kvprobe.boards."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe import boards, stats
from kvprobe.errors import StatisticsError

RNG = np.random.default_rng
ROLLOUTS = st.lists(st.tuples(st.booleans(), st.integers(-2, 2)), min_size=1, max_size=6)
QUICK = settings(max_examples=40, deadline=None)
MEASURES = (boards.board_auroc, boards.aurc, boards.e_aurc)


def board(items, lengths=None):
    """Board from one [(label, score), ...] list an item."""
    rows = [(i, r, label, float(score)) for i, item in enumerate(items) for r, (label, score) in enumerate(item)]
    table = pd.DataFrame(rows, columns=["item", "rollout", "label", "score"])
    return table if lengths is None else table.assign(length=lengths)


def random_board(seed, items=12, rollouts=8, signal=1.0, integer=False):
    rng, rows = RNG(seed), []
    for i in range(items):
        label = rng.random(rollouts) < rng.uniform(0.2, 0.8)
        score = signal * label + rng.normal(size=rollouts)
        length = rng.integers(50, 500, rollouts)
        rows += [(f"q{i}", r, label[r], score[r], length[r]) for r in range(rollouts)]
    table = pd.DataFrame(rows, columns=["item", "rollout", "label", "score", "length"])
    return table.assign(score=table["score"].round()) if integer else table


def orders(item):
    """All orders of an item's rollouts by falling score, ties in every order."""
    every = itertools.permutations(item)
    return [p for p in every if all(a[1] >= b[1] for a, b in itertools.pairwise(p))]


def slow_aurc(item):
    return np.mean([
        np.mean([np.mean([not label for label, _ in p[:k]]) for k in range(1, len(p) + 1)]) for p in orders(item)
    ])  # fmt: skip


# --------------------------------------------------------------------------------------------------------- measures


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


# ---------------------------------------------------------------------------------------------------------- pooling


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


# ----------------------------------------------------------------------------------------------------------- length


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
    rng, rows = RNG(8), []
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


# --------------------------------------------------------------------------------------------------------- mistakes


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


def test_results_are_plain():
    table = random_board(10)
    json.dumps([boards.board_auroc(table).to_dict(), boards.length_strata(table).to_dict()])
    json.dumps(boards.acc_at_k(table, 2).to_dict())

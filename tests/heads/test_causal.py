"""The check of top heads: against plain transformers, its random sets by their laws, its test by enumeration."""

from dataclasses import replace
from itertools import product

import masked_heads
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.errors import InterventionError, TaskError
from kvprobe.heads import causal, checking
from kvprobe.heads.evidence import by_layer

FAMILIES = ("llama", "gpt2", "gemma2", "gpt_oss")
SCORES = np.zeros((3, 6))
SCORES[0, 2], SCORES[2, 1], SCORES[2, 5], SCORES[1, 3] = 0.2, 0.9, 0.5, 0.7
TOP = ((2, 1), (1, 3), (2, 5), (0, 2))


def heads_of(row):
    return [tuple(map(int, each.split(":"))) for each in row.heads.split()]


def asked(model, seeds, unanswered=()):
    """Items that ask for the first thing that the model writes by itself; those in ``unanswered`` for another."""
    import kvprobe as kp

    items = []
    for seed in seeds:
        item = masked_heads.item(seed)
        out = kp.intervene(model, item.prompt, [()], suffix=1, generate=len(item.answer_ids) + 8)[0]
        text = model.tokenizer.decode(out.generated, skip_special_tokens=True)
        references = ("never written",) if seed in unanswered else (text[:2],)
        gold = tuple(out.generated[:2]) or item.answer_ids  # what the clean run writes: some arms no longer do
        items.append(replace(item, references=references, answer_ids=gold))
    return items


@pytest.fixture(scope="module")
def checked(tiny):
    model = tiny("llama")
    items = asked(model, range(6), unanswered=(2,))
    return items, causal(model, SCORES, items, k=4, draws=3, seed=7)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_arm_equals_plain_transformers_with_those_heads_masked(family, tiny, plain):
    item = masked_heads.item(5)
    found = causal(tiny(family), SCORES, [item], k=4, draws=2)
    assert found.top == TOP and len(found.rows) == 3
    clean = masked_heads.logprobs(plain(family), item)
    for row in found.rows.itertuples():
        delta, kl = masked_heads.effect(plain(family), item, heads_of(row), clean=clean)
        assert row.delta_logprob == pytest.approx(delta, abs=3e-4)
        assert row.kl == pytest.approx(kl, abs=3e-4)
        assert abs(delta) > 1e-3


def test_answers_are_those_of_plain_decoding_with_the_heads_masked(checked, plain):
    items, found = checked
    for row in found.rows.itertuples():
        item = items[row.item]
        mine, clean = (masked_heads.logprobs(plain("llama"), item, heads).argmax(-1) for heads in (heads_of(row), ()))
        assert row.unchanged == (mine.tolist() == clean.tolist())
        assert row.answered == (row.item != 2)
    assert set(found.rows["unchanged"]) == {True, False}


def test_random_sets_stay_in_the_top_heads_layers_and_leave_them_out(checked):
    items, found = checked
    drawn = found.rows[found.rows["arm"] == "random"]
    assert len(drawn) == 3 * len(items) and set(drawn["draw"]) == {0, 1, 2}
    for row in drawn.itertuples():
        heads = heads_of(row)
        assert len({*heads}) == len(heads) == row.n_heads == 4 and not {*heads} & {*TOP}
        assert {layer: len(some) for layer, some in by_layer(heads).items()} == {0: 1, 1: 1, 2: 2}
    assert drawn["heads"].nunique() > 10  # every item has draws of its own


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=19), st.integers(0, 2**20))
def test_random_sets_of_any_top_set(chosen, seed):
    others = {layer: [h for h in range(5) if (layer, h) not in chosen] for layer, _ in chosen}
    sets = checking._drawn(sorted(chosen), others, 4, [seed, 1])
    assert sets == checking._drawn(sorted(chosen), others, 4, [seed, 1])
    for heads in sets:
        assert len({*heads}) == len(heads) and not {*heads} & chosen
        for layer in range(4):
            wanted = sum(1 for at, _ in chosen if at == layer)
            assert sum(1 for at, _ in heads if at == layer) == (min(wanted, 5 - wanted) if wanted else 0)


def test_every_other_head_is_drawn_at_times():
    others = {1: [0, 2, 3, 4, 5]}
    drawn = {
        head for seed in range(40) for heads in checking._drawn([(1, 1)], others, 2, [seed, 0]) for _, head in heads
    }
    assert drawn == {*others[1]}


def test_layers_with_too_few_other_heads_are_counted(tiny):
    scores = np.zeros((3, 6))
    scores[1, :4], scores[2, 0] = 1.0, 0.5
    found = causal(tiny("llama"), scores, [masked_heads.item(0)], k=5, draws=2)
    assert (found.summary["short"], found.summary["short_layers"]) == (2, [1])
    assert found.summary["heads_by_layer"] == {1: 4, 2: 1} and found.summary["others_by_layer"] == {1: 2, 2: 5}
    for row in found.rows[found.rows["arm"] == "random"].itertuples():
        assert row.n_heads == 3 and {(1, 4), (1, 5)} < {*heads_of(row)}


def test_the_sign_flip_is_the_share_of_sign_patterns_as_extreme(checked):
    items, found = checked
    rows, summary = found.rows, found.summary
    answered = [number for number in range(len(items)) if number != 2]
    top, drawn = [], []
    for number in answered:
        mine = rows[rows["item"] == number]
        top.append(float(mine.loc[mine["arm"] == "top", "delta_logprob"].iloc[0]))
        drawn.append(sum(mine.loc[mine["arm"] == "random", "delta_logprob"]) / 3)
    d = [a - b for a, b in zip(top, drawn, strict=True)]
    sums = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in product((1, -1), repeat=len(d))]
    assert summary["p_signflip"] == pytest.approx(sum(each >= abs(sum(d)) - 1e-9 for each in sums) / len(sums))
    assert summary["p_attainable"] == pytest.approx(2 / 2**5) and summary["cannot_reject"]  # five items never can
    assert summary["top_k"] == pytest.approx(sum(top) / 5) and summary["random_k"] == pytest.approx(sum(drawn) / 5)
    assert summary["difference"] == pytest.approx(sum(d) / 5)
    assert summary["ci_low"] < summary["difference"] < summary["ci_high"]
    counts = {name: summary[name] for name in ("n", "n_answered", "n_items", "k", "draws", "short")}
    assert counts == {"n": 5, "n_answered": 5, "n_items": 6, "k": 4, "draws": 3, "short": 0}
    assert len(rows) == 6 * 4  # the unanswered item is stored, too


def test_the_seed_decides_the_draws(tiny, checked):
    items, found = checked
    again = causal(tiny("llama"), SCORES, items[:1], k=4, draws=3, seed=7)
    other = causal(tiny("llama"), SCORES, items[:1], k=4, draws=3, seed=8)
    assert again.rows["heads"].tolist() == found.rows["heads"][:4].tolist() != other.rows["heads"].tolist()


def test_without_an_answered_item_there_is_no_test(tiny):
    found = causal(tiny("llama"), SCORES, asked(tiny("llama"), [0], unanswered=(0,)), k=4, draws=2)
    assert found.summary["why"] == "the clean run answers none of 1 items"
    assert found.summary["top_k"] is found.summary["p_signflip"] is None and found.summary["n"] == 0
    assert len(found.rows) == 3 and not found.rows["answered"].any()


def test_ties_go_to_the_first_heads_and_zeros_are_counted(tiny):
    scores = np.zeros((3, 6))
    scores[2, 3] = 1.0
    found = causal(tiny("llama"), scores, [masked_heads.item(0)], k=3, draws=1)
    assert found.top == ((2, 3), (0, 0), (0, 1)) and found.summary["scored_zero"] == 2
    assert found.summary["heads"] == [[2, 3, 1.0], [0, 0, 0.0], [0, 1, 0.0]]


def test_what_cannot_be_checked_is_named(tiny):
    model, items = tiny("llama"), [masked_heads.item(0)]
    with pytest.raises(InterventionError, match=r"shape \[2, 6\]: allowed is one finite number a head, \[3, 6\]"):
        causal(model, SCORES[:2], items)
    with pytest.raises(InterventionError, match="not finite"):
        causal(model, np.full((3, 6), np.nan), items)
    with pytest.raises(InterventionError, match="one number a head"):
        causal(model, "best", items)
    with pytest.raises(InterventionError, match=r"k=18 .* 1 … 17"):
        causal(model, SCORES, items, k=18)
    with pytest.raises(InterventionError, match="draws=0"):
        causal(model, SCORES, items, k=2, draws=0)
    with pytest.raises(InterventionError, match=r"layers \[1\], none is left"):
        causal(model, np.eye(3)[1][:, None] * np.ones(6), items, k=6)
    with pytest.raises(TaskError, match="allowed is a list of at least one item"):
        causal(model, SCORES, [], k=2)
    with pytest.raises(TaskError, match="allowed is a list of at least one item"):
        causal(model, SCORES, items[0], k=2)
    with pytest.raises(TaskError, match="no evidence"):
        causal(model, SCORES, [*items, replace(items[0], spans={})], k=2)

"""Retrieval and reasoning scores equal slow loops over plain transformers, step by step, key by key."""

import head_trials
import numpy as np
import pytest
import torch

from kvprobe.engine import end_of_sequence
from kvprobe.heads import Grid, decoded, reasoning_scores, retrieval_scores
from kvprobe.heads.overlap import rouge1_recall, token_f1

STEPS = 16
VALUE = "QZX"


def favourites(model, seed):
    """Forty ids that the model likes to write after a prompt of its own favourites, so that heads can copy."""
    drawn = np.random.default_rng(seed)
    ids = model.tokenizer.encode("the model reads bytes", add_special_tokens=False)
    value = model.tokenizer.encode(VALUE, add_special_tokens=False)
    for _ in range(4):
        found = decoded(
            model, head_trials.item(model, "Say. ", ids + value, VALUE, ids[:3]), span="needle", new_tokens=STEPS
        )
        ids = drawn.choice([each for each in found.generated if each not in value], 40).tolist()
    return ids[:20] + value + ids[20:], ids[:3]


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma2", "gpt_oss"])
def test_scores_equal_plain_transformers(tiny, tiny_folder, family):
    """GQA, windows, soft-caps and learned sinks included; the span is long, so that heads do copy from it."""
    model, plain = tiny(family), head_trials.plain_model(tiny_folder(family))
    for seed in range(6):
        evidence, after = favourites(model, seed)
        asked = head_trials.item(model, "Say. ", evidence, VALUE, after)
        found = decoded(model, asked, span="needle", new_tokens=STEPS)
        if retrieval_scores(found).any() and len(found.generated) > 2:
            break
    slow = head_trials.slow_scores(plain, asked.prompt.ids.tolist(), found.span, STEPS, end_of_sequence(model))
    assert list(found.generated) == slow[0] and len(slow[0]) > 2 and found.span[1] - found.span[0] == 43
    np.testing.assert_allclose(retrieval_scores(found), slow[1], atol=1e-9)
    np.testing.assert_allclose(reasoning_scores(found), slow[2], rtol=1e-4, atol=1e-7)
    assert reasoning_scores(found).any()
    assert retrieval_scores(found).any() or family == "mistral"  # its windows of 5 end before the span


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_scores_of_the_value_alone_equal_plain_transformers(tiny, tiny_folder, family):
    model, plain = tiny(family), head_trials.plain_model(tiny_folder(family))
    asked = head_trials.item(model, "Say. ", f"one is {VALUE}, ok", VALUE, "so")
    found = decoded(model, asked, new_tokens=6)
    assert found.span == (13, 16) and model.decode(asked.prompt.ids[13:16]) == VALUE
    slow = head_trials.slow_scores(plain, asked.prompt.ids.tolist(), found.span, 6, end_of_sequence(model))
    assert list(found.generated) == slow[0]
    np.testing.assert_allclose(retrieval_scores(found), slow[1], atol=1e-9)
    np.testing.assert_allclose(reasoning_scores(found), slow[2], rtol=1e-4, atol=1e-7)
    assert reasoning_scores(found).any()


@pytest.mark.slow
def test_scores_of_a_trained_model_equal_plain_transformers(smol, smol_path):
    grid = Grid(lengths=(200,), depths=(50,), seeds=(0,), new_tokens=5)
    ((_, asked),) = grid.items(smol)
    found = decoded(smol, asked, new_tokens=5)
    plain = head_trials.plain_model(smol_path)
    slow = head_trials.slow_scores(plain, asked.prompt.ids.tolist(), found.span, 5, end_of_sequence(smol))
    assert list(found.generated) == slow[0] and found.span[1] - found.span[0] == 7
    np.testing.assert_allclose(retrieval_scores(found), slow[1], atol=1e-9)
    np.testing.assert_allclose(reasoning_scores(found), slow[2], rtol=1e-3, atol=1e-6)
    assert retrieval_scores(found).max() > 0.4


def test_left_pads_change_nothing(tiny):
    model = tiny("llama")
    plain, padded = (
        decoded(model, head_trials.item(model, "Say. ", "it is QZX ok", VALUE, "so", pad), new_tokens=8)
        for pad in (0, 3)
    )
    assert plain.generated == padded.generated and padded.span == (plain.span[0] + 3, plain.span[1] + 3)
    for score in (retrieval_scores, reasoning_scores):
        np.testing.assert_allclose(score(plain), score(padded), atol=1e-6)


def test_of_equal_keys_the_first_is_the_top_one():
    tie = [0.1, 0.4, 0.4, 0.1]
    ids = [5, 6, 6, 7]
    first = head_trials.made_up([[tie]], ids, (1, 2), [6])
    second = head_trials.made_up([[tie]], ids, (2, 3), [6])
    assert retrieval_scores(first) == [[1.0]] and retrieval_scores(second) == [[0.0]]
    assert reasoning_scores(first) == [[pytest.approx(0.4)]] and reasoning_scores(second) == [[0.0]]


def test_ties_at_the_edge_of_the_top_take_the_first_keys():
    row = [0.1, 0.1, 0.5, 0.1, 0.1, 0.1]
    found = head_trials.made_up([[row]], [5] * 6, (1, 4), [9])
    assert reasoning_scores(found)[0, 0] == pytest.approx((0.5 + 0.1) / 3)  # top 3: keys 2, 0, 1


def test_a_head_must_copy_the_token_itself_and_from_inside_the_span():
    look = [[[0, 0, 1, 0]], [[0, 1, 0, 0]], [[0, 0, 0, 1]], [[1, 0, 0, 0]]]
    found = head_trials.made_up(look, [9, 8, 9, 9], (1, 3), [9])
    assert retrieval_scores(found).tolist() == [[0.5, 0.0, 0.0, 0.0]]
    assert reasoning_scores(found).tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_steps_add_up():
    rows = [[[0, 1, 0], [0, 0, 1], [0, 1, 0]]]
    found = head_trials.made_up(rows, [4, 5, 6], (1, 3), [5, 6, 5])
    assert retrieval_scores(found).tolist() == [[1.5]] and reasoning_scores(found).tolist() == [[1.5]]


def test_nothing_written_scores_nothing(tiny, monkeypatch):
    """The end of the text at once: recall 0, all scores 0, and the trial is not kept."""
    from kvprobe import heads

    model = tiny("llama")
    asked = head_trials.item(model, "Say. ", "it is QZX ok", VALUE, "so")
    first = decoded(model, asked, new_tokens=1).generated[0]
    monkeypatch.setattr(model.twin.generation_config, "eos_token_id", first)
    found = decoded(model, asked, new_tokens=8)
    assert (found.generated, found.text, found.recall, found.f1) == ((), "", 0.0, 0.0)
    assert len(found.trace.queries) == 1
    for score in (retrieval_scores, reasoning_scores):
        assert score(found).shape == (3, 6) and not score(found).any()
    trial = heads.trial(model, heads.Cell(100, 0, 0, 0), asked, new_tokens=8)
    assert not trial.kept("retrieval") and not trial.kept("reasoning")


@pytest.mark.parametrize(
    ("answer", "value", "recall", "f1"),
    [
        (" 4057188.", "4057188", 1, 1),
        (" 4057188, I think", "4057188", 1, 0.5),
        ("405718", "4057188", 0, 0),
        ("The blue house", "blue house", 1, 1),
        ("a-b c", "b b a", 2 / 3, 0),
        ("B and A", "a b", 1, 2 / 3),
        ("", "x", 0, 0),
        ("x", "", 0, 0),
    ],
)
def test_recall_and_f1_of_answers(answer, value, recall, f1):
    assert rouge1_recall(answer, value) == pytest.approx(recall)
    assert token_f1(answer, value) == pytest.approx(f1)


def test_rows_are_those_that_wrote_each_token(tiny):
    model = tiny("llama")
    asked = head_trials.item(model, "Say. ", "it is QZX ok", VALUE, "so")
    found, n = decoded(model, asked, new_tokens=8), len(asked.prompt)
    assert found.trace.queries == list(range(n - 1, n - 1 + len(found.generated)))
    assert torch.equal(found.trace.ids[n:], torch.tensor(found.generated[:-1]))

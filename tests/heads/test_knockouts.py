"""The evidence masked in one head at a time, against plain transformers, loops, and TransformerLens' own hooks."""

import threading

import masked_heads
import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe as kp
from kvprobe import runs
from kvprobe.errors import PromptError, StatisticsError, TaskError, TheoryError
from kvprobe.heads import agreement, knockouts, single_heads
from kvprobe.heads.sharing import shared_below

FAMILIES = ("llama", "gpt2", "gemma2", "gpt_oss")
every_family = pytest.mark.parametrize("family", FAMILIES)
HEADS = [(layer, head) for layer in range(3) for head in range(6)]


@pytest.fixture(scope="module")
def masked(tiny):
    """Family → the knockouts of one item whose evidence is in two pieces."""
    done = {}

    def run(family):
        if family not in done:
            done[family] = knockouts(tiny(family), two_pieces())
        return done[family]

    return run


def two_pieces():
    return masked_heads.item(3, evidence=((6, 8), (10, 12)))


@every_family
def test_every_head_equals_plain_transformers_with_that_head_masked(family, masked, plain):
    frame, item = masked(family), two_pieces()
    assert list(zip(frame["layer"], frame["head"], strict=True)) == HEADS
    clean = masked_heads.logprobs(plain(family), item)
    expected = np.array([masked_heads.effect(plain(family), item, [one], clean=clean) for one in HEADS])
    np.testing.assert_allclose(frame["delta_logprob"], expected[:, 0], atol=2e-4)
    np.testing.assert_allclose(frame["kl"], expected[:, 1], atol=2e-5, rtol=1e-3)
    assert np.abs(expected[:, 0]).min() < 0.3 < np.abs(expected[:, 0]).max()  # not a comparison of zeros
    assert (frame["kl"] >= -1e-9).all()


@every_family
@pytest.mark.parametrize("p", [1, 2])
def test_closed_forms_equal_loops_in_float64(family, p, tiny):
    model, item = tiny(family), two_pieces()
    frame = knockouts(model, item, p=p)
    rows = list(range(item.context_stop, len(item.prompt) + len(item.answer_ids)))
    trace = kp.observe(model, item.prompt.extended(item.answer_ids), rows)
    expected = np.array(masked_heads.closed(trace, item.spans["evidence"], p)).reshape(-1, 3)
    for place, name in enumerate(("perturbation", "bound", "mass")):
        np.testing.assert_allclose(frame[name], expected[:, place], rtol=2e-5, atol=1e-6)
    assert (frame["perturbation"] <= frame["bound"] * (1 + 1e-6)).all()


def test_other_spans_are_cut_instead_of_the_evidence(tiny, plain):
    item = two_pieces()
    frame = knockouts(tiny("llama"), item, spans=[(2, 5)])
    clean = masked_heads.logprobs(plain("llama"), item)
    expected = [masked_heads.effect(plain("llama"), item, [one], [(2, 5)], clean)[0] for one in HEADS]
    np.testing.assert_allclose(frame["delta_logprob"], expected, atol=2e-4)
    assert frame.attrs["spans"] == [[2, 5]]


def test_pads_in_front_change_nothing(tiny):
    bare, padded = (knockouts(tiny("llama"), masked_heads.item(1, pad=pad)) for pad in (0, 5))
    pd.testing.assert_frame_equal(bare, padded, atol=1e-5, rtol=1e-5)
    assert padded.attrs["tokens"] == bare.attrs["tokens"] + 5


def test_a_prefix_is_used_and_another_prompts_is_refused(tiny, masked):
    model, item = tiny("llama"), two_pieces()
    prefix = kp.prefill(model, item.prompt, item.context_stop)
    pd.testing.assert_frame_equal(knockouts(model, item, prefix=prefix), masked("llama"), atol=1e-5, rtol=1e-5)
    with pytest.raises(PromptError, match="other tokens"):
        knockouts(model, masked_heads.item(4), prefix=prefix)


def test_the_clean_answer_stands_beside_the_table(masked, plain):
    item = two_pieces()
    clean = masked_heads.logprobs(plain("llama"), item)
    expected = sum(float(clean[t, token]) for t, token in enumerate(item.answer_ids))
    assert masked("llama").attrs["clean_logprob"] == pytest.approx(expected, abs=1e-4)
    assert masked("llama").attrs["tokens"] == len(item.prompt)


@every_family
@pytest.mark.parametrize("layers", [1, 2])
def test_batches_of_few_layers_equal_one_of_all(family, layers, tiny, masked, monkeypatch):
    rows = len(single_heads.rows(two_pieces()))
    monkeypatch.setattr(runs, "BATCH_TOKENS", (layers * 6 + 1) * rows)
    few = knockouts(tiny(family), two_pieces())
    pd.testing.assert_frame_equal(few, masked(family), atol=1e-4, rtol=1e-3)


def test_layers_below_the_masked_ones_run_once_for_all(tiny, monkeypatch):
    model, item = tiny("llama"), two_pieces()
    monkeypatch.setattr(runs, "BATCH_TOKENS", 7 * len(single_heads.rows(item)))  # one layer's six heads, and clean
    prefix = kp.prefill(model, item.prompt, item.context_stop)
    blocks, seen = model.twin.model.layers, []
    handles = [
        block.mlp.register_forward_pre_hook(lambda _, args, layer=layer: seen.append((layer, args[0].shape[0])))
        for layer, block in enumerate(blocks)
    ]
    try:
        knockouts(model, item, prefix=prefix)
    finally:
        for handle in handles:
            handle.remove()
    # One look at the clean rows, then a pass a layer: single rows below it.
    assert seen == [(0, 1), (1, 1), (2, 1), (0, 7), (1, 7), (2, 7), (0, 1), (1, 7), (2, 7), (0, 1), (1, 1), (2, 7)]
    assert not any(block._forward_pre_hooks for block in blocks)


@every_family
def test_arms_that_share_layers_equal_arms_that_do_not(family, tiny):
    model, item = tiny(family), two_pieces()
    prefix = kp.prefill(model, item.prompt, item.context_stop)
    arms = [(), *(kp.KVMask(item.spans["evidence"], heads={2: [head]}) for head in range(6))]
    options = {"suffix": 4, "continuation": item.answer_ids, "prefix": prefix, "keep_trace": False}
    apart = kp.intervene(model, item.prompt, arms, **options)
    with shared_below(model.twin, 3, 2):
        shared = kp.intervene(model, item.prompt, arms, **options)
    for one, other in zip(apart, shared, strict=True):
        torch.testing.assert_close(one.logits, other.logits, atol=2e-6, rtol=1e-6)
        assert one.receipt.cells_reached == other.receipt.cells_reached
    assert float((apart[1].logits - apart[0].logits).abs().max()) > 0.01


def test_sharing_leaves_other_passes_alone_and_always_ends(tiny):
    model = tiny("llama")
    ids = torch.tensor([[1, 5, 9, 30], [1, 70, 8, 200]])
    with torch.no_grad():
        alone = model.twin(ids).logits
        with shared_below(model.twin, 3, 2):
            inside = model.twin(ids).logits  # a batch of different texts, outside any run of ours
    assert torch.equal(alone, inside)
    with pytest.raises(ZeroDivisionError), shared_below(model.twin, 3, 1):
        raise ZeroDivisionError
    assert not any(block._forward_pre_hooks for block in model.twin.model.layers)


def test_sharing_leaves_other_threads_alone(tiny):
    """Arms that differ below the shared layer would come out alike if this thread's hooks served another."""
    model, item, found = tiny("llama"), two_pieces(), []
    arms = [(), kp.KVMask(item.spans["evidence"], heads={0: [1]})]

    def elsewhere():
        found.extend(kp.intervene(model, item.prompt, arms, suffix=4))

    with shared_below(model.twin, 3, 2):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert float((found[0].logits - found[1].logits).abs().max()) > 0.01


def test_the_plain_loop_of_transformer_lens_agrees(tiny, masked):
    model, item, frame = tiny("llama"), two_pieces(), masked("llama")
    ids = torch.tensor([masked_heads.tokens(item)])
    arm = int(frame["delta_logprob"].abs().argmax())
    layer, head = HEADS[arm]

    def cut(scores, hook):
        for start, stop in item.spans["evidence"]:
            scores[:, head, item.context_stop :, start:stop] = -torch.inf
        return scores

    logits = []
    with torch.no_grad():
        for hooks in ([], [(f"blocks.{layer}.attn.hook_attn_scores", cut)]):
            logits.append(model.bridge.run_with_hooks(ids, fwd_hooks=hooks, prepend_bos=False)[0])
    rows = slice(len(item.prompt) - 1, -1)
    gold = [float(kp.outcomes.answer_logprobs(each[rows], item.answer_ids).sum()) for each in logits]
    assert frame["delta_logprob"][arm] == pytest.approx(gold[1] - gold[0], abs=2e-4)


def test_rows_are_worked_through_in_chunks(tiny, masked, monkeypatch):
    monkeypatch.setattr(single_heads, "ROWS_BYTES", 1)
    for family in ("llama", "gpt_oss"):
        found = knockouts(tiny(family), two_pieces())
        for name in ("perturbation", "bound", "mass"):
            np.testing.assert_allclose(found[name], masked(family)[name], rtol=1e-6)


def test_agreement_is_spearmans(masked):
    from scipy.stats import spearmanr

    frame = masked("llama")
    found = agreement(frame)
    for effect, values in (("kl", frame["kl"]), ("delta", frame["delta_logprob"].abs())):
        for form in ("perturbation", "bound", "mass"):
            assert found[f"{effect}_{form}"] == pytest.approx(spearmanr(values, frame[form]).statistic)
    worst = min(zip(frame["delta_logprob"], HEADS, strict=True))
    assert (found["worst"]["delta_logprob"], found["worst"]["layer"], found["worst"]["head"]) == (worst[0], *worst[1])
    assert (found["n_heads"], found["tokens"]) == (18, frame.attrs["tokens"])


def test_agreement_of_a_constant_is_none_and_several_items_are_refused(masked):
    flat = masked("llama").assign(mass=0.0)
    assert agreement(flat)["kl_mass"] is None and agreement(flat)["kl_bound"] is not None
    with pytest.raises(StatisticsError, match="several times"):
        agreement(pd.concat([flat, flat]))


def test_what_cannot_be_masked_is_named(tiny):
    from dataclasses import replace

    model, item = tiny("llama"), two_pieces()
    with pytest.raises(TaskError, match="no evidence"):
        knockouts(model, replace(item, spans={"evidence": []}))
    with pytest.raises(TaskError, match="no answer tokens"):
        knockouts(model, replace(item, answer_ids=()))
    with pytest.raises(TaskError, match="'text' is no item"):
        knockouts(model, "text")
    with pytest.raises(TheoryError, match="p = 3; allowed: 1, 2"):
        knockouts(model, item, p=3)
    with pytest.raises(PromptError, match=r"\(3, 99\)"):
        knockouts(model, item, spans=[(3, 99)])

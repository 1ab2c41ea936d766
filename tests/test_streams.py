"""Attention outputs and hidden states of a run: plain transformers, and the theory where one layer is masked."""

import catalogue
import pytest
import torch
from plain_streams import plain_streams
from tiny import FAMILIES
from torch.testing import assert_close

from kvprobe import engine, intervene, theory
from kvprobe.attention import Run
from kvprobe.errors import KVProbeError, ModelError
from kvprobe.eviction import KeepMask
from kvprobe.interventions import KVMask
from kvprobe.prompts import Prompt
from kvprobe.streams import tapped, watched

families = pytest.mark.parametrize("family", FAMILIES)
N, STOP = 24, 16
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


def sets(seed, L=3, K=2, n=STOP):
    """Kept sets [L, K, n] that lose about half."""
    g = torch.Generator().manual_seed(seed)
    keep = torch.rand(L, K, n, generator=g) < 0.5
    keep[..., 3] = True
    return keep


def table_of(keep, total, n_heads=6, layers=None):
    """[L, H, total, total]: every query behind the context loses what is not kept, by loops."""
    L, K, n = keep.shape
    table = torch.zeros(L, n_heads, total, total)
    for layer in range(L) if layers is None else layers:
        for head in range(n_heads):
            for key in range(n):
                if not keep[layer, head * K // n_heads, key]:
                    table[layer, head, n:, key] = -torch.inf
    return table


def group_sets(model, seed):
    return sets(seed, K=model.geometry.n_kv_heads)


@families
@pytest.mark.parametrize("rows", [1, 5])
def test_streams_are_those_of_plain_transformers(family, rows, tiny, plain):
    """Clean and under eviction, in one batch; the hidden states are also what output_hidden_states calls them."""
    model, ids = tiny(family), catalogue.ids(1, N)
    keep = group_sets(model, 2)
    found = intervene(
        model, Prompt.from_ids(ids), [KVMask(keys=[]), KeepMask(keep)], suffix=N - STOP, keep_trace=False, streams=rows
    )
    for outcome, table in zip(found, (None, table_of(keep, N)), strict=True):
        attn_out, resid_post = plain_streams(plain(family), ids, table)
        assert outcome.streams.attn_out.shape == outcome.streams.resid_post.shape == (3, rows, 48)
        assert_close(outcome.streams.attn_out, attn_out[:, -rows:], **CLOSE)
        assert_close(outcome.streams.resid_post, resid_post[:, -rows:], **CLOSE)
    moved = (found[0].streams.attn_out - found[1].streams.attn_out).abs().amax((1, 2))
    assert float(moved[-1]) > 1e-2  # the first layers of a short window see nothing of the context
    with torch.no_grad():
        hidden = plain(family).hf(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    # hidden_states[i + 1] is what layer i leaves; the last one has been through the final norm
    assert_close(found[0].streams.resid_post[:-1], torch.stack(hidden[1:-1])[:, 0, -rows:], **CLOSE)


@families
def test_a_batch_is_one_arm_at_a_time(family, tiny):
    model = tiny(family)
    prompt = Prompt.from_ids(catalogue.ids(3, N))
    arms = [KVMask(keys=[]), *(KeepMask(group_sets(model, seed)) for seed in range(4))]
    run = lambda some, **more: intervene(model, prompt, some, suffix=N - STOP, streams=2, **more)  # noqa: E731
    together, pairs = run(arms), run(arms, batch=2)
    for arm, outcome, other in zip(arms, together, pairs, strict=True):
        alone = run([arm])[0]
        for name in ("attn_out", "resid_post"):
            assert_close(getattr(outcome.streams, name), getattr(alone.streams, name), rtol=1e-4, atol=1e-5)
            assert_close(getattr(other.streams, name), getattr(alone.streams, name), rtol=1e-4, atol=1e-5)


@families
def test_rows_of_a_continuation_are_streams_too_and_decoding_leaves_no_trace(family, tiny, plain):
    model, ids, forced = tiny(family), catalogue.ids(4, N), [41, 300, 7]
    outcome = intervene(
        model, Prompt.from_ids(ids), [KVMask(keys=[])], suffix=2, continuation=forced, generate=4, streams=4
    )[0]
    attn_out, resid_post = plain_streams(plain(family), [*ids, *forced])
    assert_close(outcome.streams.attn_out, attn_out[:, -4:], **CLOSE)
    assert_close(outcome.streams.resid_post, resid_post[:, -4:], **CLOSE)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_left_pads_are_no_rows(family, tiny):
    model, ids = tiny(family), catalogue.ids(5, N)
    padded = Prompt.from_ids([0] * 3 + ids, attention_mask=[0] * 3 + [1] * N)
    one, other = (
        intervene(model, prompt, [KVMask(keys=[])], suffix=6, streams=6)[0].streams
        for prompt in (Prompt.from_ids(ids), padded)
    )
    assert torch.equal(one.attn_out, other.attn_out) and torch.equal(one.resid_post, other.resid_post)


@families
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("p", [1, 2])
def test_law_9_one_layer_alone_changes_by_what_the_theory_says(family, layer, p, tiny, plain):
    """‖attn_out′ − attn_out‖ of plain transformers and of the streams: the closed form, from the clean row alone."""
    model, ids = tiny(family), catalogue.ids(6, N)
    stop = N - 3  # a window of 5 sees two of them
    keep = sets(7, K=model.geometry.n_kv_heads, n=stop)
    keep[:, ::2, -2:] = torch.tensor([True, False])
    alone = torch.ones_like(keep)
    alone[layer] = keep[layer]
    prompt = Prompt.from_ids(ids)
    # the last row only: behind the first layer, an earlier row's change would alter this row's inputs
    whole, evicted = intervene(model, prompt, [KVMask(keys=[]), KeepMask(alone)], suffix=1, streams=1)
    change = (evicted.streams.attn_out - whole.streams.attn_out)[layer, -1].double()
    size = float(change.abs().sum() if p == 1 else change.norm())
    view = whole.trace.layer(layer)
    row, sink = theory.attention(view.logits[:, -1].double(), None if view.sink is None else view.sink.double())
    kept = torch.ones(6, N, dtype=torch.bool)
    kept[:, :stop] = keep[layer].repeat_interleave(6 // keep.shape[1], 0)
    expected = float(theory.layer_perturbation(row, view.values.double(), view.w_o.double(), kept, p, sink))
    assert size == pytest.approx(expected, rel=2e-4, abs=2e-4)
    table = table_of(keep, N, layers=[layer])
    table[:, :, :-1] = 0.0
    before, after = (plain_streams(plain(family), ids, mask)[0][layer, -1].double() for mask in (None, table))
    by_hand = after - before
    assert float(by_hand.abs().sum() if p == 1 else by_hand.norm()) == pytest.approx(expected, rel=1e-3, abs=5e-4)
    assert expected > 0.01


def test_the_norm_of_a_change_is_no_norm_of_norms(tiny):
    """Two layers masked: the second one's change is not what it would be alone, since its inputs differ."""
    model, keep = tiny("llama"), sets(8)
    first = keep.clone()
    first[1:] = True
    prompt = Prompt.from_ids(catalogue.ids(9, N))
    whole, one, both = (
        each.streams.attn_out
        for each in intervene(
            model, prompt, [KVMask(keys=[]), KeepMask(first), KeepMask(keep)], suffix=N - STOP, streams=1
        )
    )
    assert_close(one[0], both[0], rtol=1e-5, atol=1e-5)
    assert float((one[1] - whole[1]).abs().sum()) > 1e-2  # unmasked itself, and still moved
    assert float((one[1] - both[1]).abs().sum()) > 1e-2


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.twin.modules())


@families
def test_no_hook_stays(family, tiny, monkeypatch):
    model = tiny(family)
    before = hooks(model)
    prompt = Prompt.from_ids(catalogue.ids(1, N))
    intervene(model, prompt, [KVMask(keys=[])], suffix=1, streams=1)
    assert hooks(model) == before
    with pytest.raises(RuntimeError, match="on purpose"), tapped(model.twin, 3, 1):
        assert hooks(model) == before + 6
        raise RuntimeError("on purpose")
    assert hooks(model) == before

    def broken(*given, **more):
        raise RuntimeError("a layer failed")

    mlp = next(module for name, module in model.twin.named_modules() if name.rpartition(".")[2] == "mlp")
    monkeypatch.setattr(mlp, "forward", broken)
    with pytest.raises(RuntimeError, match="a layer failed"):
        intervene(model, prompt, [KVMask(keys=[])], suffix=1, streams=1)
    assert hooks(model) == before


def test_hooks_are_removed_when_only_some_could_be_set(tiny, monkeypatch):
    from kvprobe import streams

    model = tiny("llama")
    before, real = hooks(model), streams._keeper

    def third(kept, layer, rows):
        if layer == 1:
            raise RuntimeError("no more hooks")
        return real(kept, layer, rows)

    monkeypatch.setattr(streams, "_keeper", third)
    with pytest.raises(RuntimeError, match="no more hooks"), tapped(model.twin, 3, 1):
        raise AssertionError("never entered")
    assert hooks(model) == before


def test_arms_own_copies(tiny):
    """What an outcome holds is not a view of the batch, so that the batch can be freed."""
    model, prompt = tiny("llama"), Prompt.from_ids(catalogue.ids(1, N))
    outcome = intervene(model, prompt, [KVMask(keys=[]), KeepMask(sets(1))], suffix=N - STOP, streams=1)[0]
    for tensor in (outcome.streams.attn_out, outcome.streams.resid_post):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_none_unless_asked_for(tiny):
    assert intervene(tiny("llama"), Prompt.from_ids(catalogue.ids(1, N)), KVMask(keys=[]), suffix=3).streams is None


@pytest.mark.parametrize(
    ("streams", "said"),
    [(5, "streams=5: the run has 4 rows; allowed: at most that many"), (-1, "streams"), (1.5, "streams")],
)
def test_more_rows_than_are_run_are_refused(streams, said, tiny):
    with pytest.raises(KVProbeError, match=said) as caught:
        intervene(tiny("llama"), Prompt.from_ids(catalogue.ids(1, N)), [KVMask(keys=[])], suffix=4, streams=streams)
    assert "\n" not in str(caught.value)


def test_attention_outside_a_layer_is_refused():
    from kvprobe.streams import _parents

    bare = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match="attention outside a layer"):
        _parents(torch.nn.Sequential(bare), [bare])


@families
def test_what_enters_a_layer_is_what_plain_transformers_say(family, tiny, plain):
    """Every row of every layer's input, in order; no hook stays, and another run's pass is not looked at."""
    model, ids = tiny(family), torch.tensor([catalogue.ids(2, N)])
    before, seen, run = hooks(model), [], Run()
    with watched(model.twin, 3, lambda layer, hidden: seen.append((layer, hidden.clone())), run):
        assert hooks(model) == before + 3
        engine.forward(model.twin, ids, run, engine.new_cache())
        engine.forward(model.twin, ids, Run(), engine.new_cache())
    assert hooks(model) == before
    assert [layer for layer, _ in seen] == [0, 1, 2] and not any(hidden.requires_grad for _, hidden in seen)
    with torch.no_grad():
        expected = plain(family).hf(input_ids=ids, output_hidden_states=True).hidden_states
    for layer, hidden in seen:
        assert_close(hidden, expected[layer], **CLOSE)
    found = intervene(model, Prompt.from_ids(ids[0]), KVMask(keys=[]), suffix=N - 1, streams=N - 1).streams
    for layer, hidden in seen[1:]:
        assert_close(hidden[0, 1:], found.resid_post[layer - 1], **CLOSE)


def test_watching_without_a_run_sees_every_pass_and_always_ends(tiny):
    model, ids = tiny("llama"), torch.tensor([catalogue.ids(2, N)])
    seen, before = [], hooks(model)
    with watched(model.twin, 3, lambda layer, hidden: seen.append(layer)):
        engine.forward(model.twin, ids, Run(), engine.new_cache())
        model.twin(ids)
    assert seen == [0, 1, 2] * 2

    def broken(layer, hidden):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), watched(model.twin, 3, broken):
        model.twin(ids)
    assert hooks(model) == before

"""Runs keep to their limits, and limits change nothing but how much goes through at once."""

import pytest
import torch
from torch.testing import assert_close

from kvprobe import KVMask, Prompt, attention, costs, engine, intervene, observe, prefill, runs
from kvprobe.costs import Costs, Job, automatic, base_bytes, fit, limits_for, peak, rough_bytes
from kvprobe.errors import PlanError
from kvprobe.sizes import UNLIMITED, Limits

FAMILIES = ("llama", "gpt2", "mistral", "gemma2", "gpt_oss")
every_family = pytest.mark.parametrize("family", FAMILIES)
IDS = torch.randint(3, 320, (90,), generator=torch.Generator().manual_seed(1))
PROMPT = Prompt.from_ids(IDS)


@every_family
@pytest.mark.parametrize("chunk", [1, 7, 32, 89, 90, 500])
def test_a_prefill_in_pieces_is_the_same(family, chunk, tiny):
    twin, rows = tiny(family).twin, torch.tensor([80, 3, 31, 32, 3, 89])
    whole, run = engine.prefill(twin, IDS, rows)
    pieces, other = engine.prefill(twin, IDS, rows, limits=Limits(chunk=chunk, logits_bytes=1 << 12))
    assert_close(pieces.next_logits, whole.next_logits, atol=5e-5, rtol=1e-5)
    for (keys, values), (theirs, more) in zip(pieces.layers, whole.layers, strict=True):
        assert_close(keys, theirs, atol=5e-5, rtol=1e-5)
        assert_close(values, more, atol=5e-5, rtol=1e-5)
    for layer in range(3):
        assert_close(other.queries[layer], run.queries[layer], atol=5e-5, rtol=1e-5)
        assert other.specs[layer].window == run.specs[layer].window


@every_family
def test_observing_in_pieces_is_the_same(family, tiny):
    model = tiny(family)
    whole = observe(model, PROMPT, [5, 60, -1])
    pieces = observe(model, PROMPT, [5, 60, -1], plan=Limits(chunk=16))
    for layer in range(3):
        assert_close(pieces.layer(layer).attention, whole.layer(layer).attention, atol=5e-5, rtol=1e-5)


@every_family
def test_arms_under_limits_are_the_same(family, tiny):
    model, masks = tiny(family), [(), *(KVMask(keys=(at, at + 6)) for at in range(0, 60, 8))]
    free = intervene(model, PROMPT, masks, suffix=9)
    for plan in (Limits(batch=1), Limits(chunk=16, batch=3), Limits(logits_bytes=1 << 12)):
        for mine, theirs in zip(intervene(model, PROMPT, masks, suffix=9, plan=plan), free, strict=True):
            assert_close(mine.logits, theirs.logits, atol=5e-5, rtol=1e-5)
            assert mine.receipt.masked_weight == 0
            assert_close(mine.receipt.retained, theirs.receipt.retained, atol=1e-5, rtol=1e-5)


def test_nothing_larger_goes_through(tiny, monkeypatch):
    model, shapes = tiny("llama"), []
    forward = engine.forward

    def watched(twin, ids, run, *args, **kwargs):
        shapes.append((*ids.shape, run.prefix is not None, run.limit))
        return forward(twin, ids, run, *args, **kwargs)

    monkeypatch.setattr(engine, "forward", watched)
    masks = [KVMask(keys=(at, at + 6)) for at in range(0, 50, 10)]
    intervene(model, PROMPT, masks, suffix=10, plan=Limits(chunk=32, batch=2, logits_bytes=1 << 14))
    assert shapes == [
        (1, 32, False, 1 << 14),
        (1, 32, False, 1 << 14),
        (1, 16, False, 1 << 14),
        (2, 10, True, 1 << 14),
        (2, 10, True, 1 << 14),
        (1, 10, True, 1 << 14),
    ]
    shapes.clear()
    intervene(model, PROMPT, masks, suffix=10, batch=4, plan=Limits(batch=2))  # what is said twice: the nearer word
    assert [shape[0] for shape in shapes] == [1, 4, 1]


def test_an_attention_block_is_no_larger_than_its_limit(tiny, monkeypatch):
    """A later piece of a prompt never builds its whole mask: blocks of rows × keys, at most the limit."""
    masks, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*args, **kwargs):
        if kwargs.get("attn_mask") is not None:
            masks.append(kwargs["attn_mask"].numel())
        return sdpa(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    ids = torch.randint(3, 320, (400,), generator=torch.Generator().manual_seed(2))
    engine.prefill(tiny("llama").twin, ids, limits=Limits(chunk=200, logits_bytes=1 << 17))
    assert len(masks) >= 6 and 0 < max(masks) <= (1 << 17) // 4


@every_family
@pytest.mark.parametrize("share", [0.45, 0.6, 0.8])
def test_what_fit_chooses_fits_and_is_the_largest(family, share, tiny):
    model, job = tiny(family), Job(500, 2, 24, 30, batch=24)
    free = peak(0, model.costs.steps(job, Limits(500, 24, 8 << 20)))
    memory = int(share * free)
    limits, steps = fit(model.costs, job, 0, memory, UNLIMITED)
    if peak(0, steps) > memory:
        # Nothing is left to shrink where it matters, or what is held anyway is too much.
        smallest = Limits(128, 1, 1 << 20)
        assert peak(0, model.costs.steps(job, smallest)) > memory
        return
    for name, top in (("chunk", 500), ("batch", 24)):
        value = getattr(limits, name)
        if value < top:
            larger = Limits(**{**vars(limits), name: min(2 * value, top), "logits_bytes": 8 << 20})
            assert peak(0, model.costs.steps(job, larger)) > memory


def test_what_is_given_stays(tiny):
    model, job = tiny("llama"), Job(500, 2, 24, 30, batch=24)
    limits, _ = fit(model.costs, job, 0, 1, Limits(chunk=300, batch=5, logits_bytes=1 << 22))
    assert limits == Limits(300, 5, 1 << 22)


@every_family
def test_the_rough_bound_is_above_the_plan(family, tiny):
    """Only what it lets pass runs without a plan."""
    model = tiny(family)
    for job in (
        Job(500, 1),
        Job(500, 400),
        Job(500, 1, 20, 30, batch=20),
        Job(64, 0, 200, 60, True, batch=20),
        Job(3, 1),
    ):
        steps = model.costs.steps(job, Limits(job.n, job.batch, 1 << 16))
        assert rough_bytes(model.twin, job) > peak(0, steps)


def test_a_run_without_a_plan_keeps_to_the_memory_at_hand(tiny, monkeypatch):
    monkeypatch.setitem(attention.CHUNK_BYTES, "cpu", 1 << 16)
    model, ids = tiny("llama"), torch.randint(3, 320, (500,), generator=torch.Generator().manual_seed(3))
    prompt, job = Prompt.from_ids(ids), Job(500, 1)
    expected = observe(model, prompt).layer(2).attention
    free = peak(0, model.costs.steps(job, Limits(500, 1)))
    monkeypatch.setattr(automatic, "base_bytes", lambda device: 0)
    monkeypatch.setattr(automatic, "at_hand", lambda device: int(0.85 * free / automatic.SAFE))
    limits = limits_for(model, job)
    assert limits.chunk in (128, 256) and peak(0, model.costs.steps(job, limits)) <= 0.85 * free
    assert_close(observe(model, prompt).layer(2).attention, expected, atol=5e-5, rtol=1e-5)
    monkeypatch.setattr(automatic, "at_hand", lambda device: 1000)
    for call in (observe, lambda *a: prefill(*a), lambda m, p: intervene(m, p, [()], suffix=4)):
        with pytest.raises(
            PlanError, match=r"llama: 500 tokens and \d arms need .* at least, 900 B are at hand; allowed: "
        ):
            call(model, prompt)


def test_a_run_that_obviously_fits_is_not_planned(tiny, monkeypatch):
    def never(*args):
        raise AssertionError

    monkeypatch.setattr(costs.steps, "run_dry", never)
    assert limits_for(tiny("gpt2"), Job(400, 5, 3, 10)) is UNLIMITED
    assert base_bytes(torch.device("cpu")) > 10 << 20


@pytest.mark.parametrize("plan", [5, "6GiB", {"chunk": 3}, Job(5)])
def test_what_is_no_plan(plan, tiny):
    for call in (lambda: observe(tiny("llama"), PROMPT, plan=plan), lambda: prefill(tiny("llama"), PROMPT, plan=plan)):
        with pytest.raises(PlanError, match=r"plan=.* is not a plan: allowed is what kvprobe.plan.make"):
            call()


def test_code_that_reads_numbers_is_refused(tiny):
    twin = costs.hollow(tiny("llama").twin)

    def peeking(*args, **kwargs):
        return bool(kwargs["input_ids"].sum() > 0)

    twin.forward = peeking
    with pytest.raises(PlanError, match="LlamaForCausalLM cannot be run without numbers"):
        Costs(twin, torch.device("cpu")).steps(Job(10), UNLIMITED)


def test_batches_of_a_plan_are_those_of_a_run():
    assert runs.batch_size(40, 320) == runs.BATCH_TOKENS // 40

"""Everything that a model on another device, or on two, is asked: nothing mixes devices, and the numbers are the CPU's.

No accelerator is needed: :mod:`elsewhere` makes one believed in, which checks every operation as CUDA would.
"""

import copy
from dataclasses import replace
from functools import cache

import catalogue
import elsewhere
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from kvprobe import eviction, intervene, observe, outcomes, prefill
from kvprobe.interventions import Inject, KeepMask, KVMask, KVPatch, ResidualAblation, ValueGate
from kvprobe.prompts import Prompt
from kvprobe.spans import all_spans, layer_perturbation, span_stats

FAMILIES = ("gpt2", "llama", "gemma2", "gpt_oss")
PADS, SUFFIX = 2, 8
IDS = catalogue.ids(0)
N = len(IDS)
PROMPT = Prompt.from_ids([0] * PADS + IDS, {"needle": (6, 9)}, attention_mask=[0] * PADS + [1] * N)
placed = pytest.mark.parametrize("devices", [1, 2])
every_family = pytest.mark.parametrize(("family", "devices"), [("llama", 1), *((family, 2) for family in FAMILIES)])


@pytest.fixture(scope="module")
def far(tiny):
    """(family, number of devices) → the same tiny model, believed to be there."""

    def make(family, devices):
        model = tiny(family)
        twin = copy.deepcopy(model.twin)
        twin.set_experts_implementation("eager")  # the default one sorts tokens by what a device can do
        return replace(model, twin=elsewhere.moved(twin, devices))

    return cache(make)


def close(mine, theirs):
    assert isinstance(mine, elsewhere.There) or mine.device == elsewhere.CPU
    assert_close(elsewhere.home(mine), theirs, atol=5e-5, rtol=1e-4)


def same_numbers(mine, theirs):
    np.testing.assert_allclose(mine.to_numpy(float), theirs.to_numpy(float), atol=2e-4, rtol=2e-3)


def on_there(model, devices):
    """The prefix of the model's own keys lies where its layers are."""
    return [str(keys.device) for keys, _ in prefill(model, PROMPT).layers] == [
        f"meta:{layer * devices // 3}" for layer in range(3)
    ]


@every_family
def test_observed_rows_and_what_spans_say_of_them(family, devices, far, tiny):
    spans = [(3, 5), (2, 9), (20, 26)]
    tables = []
    for model in (tiny(family), far(family, devices)):
        with elsewhere.strict():
            trace = observe(model, PROMPT, [18, -1])
            sweep = all_spans(trace, 4, p=2)
            tables.append((span_stats(trace, spans), layer_perturbation(trace, spans, p=2), trace, sweep.frame()))
            assert model is tiny(family) or on_there(model, devices)
    (stats, layers, trace, swept), (far_stats, far_layers, far_trace, far_swept) = tables
    same_numbers(far_stats, stats)
    same_numbers(far_layers, layers)
    same_numbers(far_swept, swept)
    with elsewhere.strict():
        for layer in range(3):
            close(far_trace.layer(layer, [1]).attention, trace.layer(layer, [1]).attention)


def arms_of(model):
    """Every intervention, alone and together, keys that move and rows that fall silent included."""
    donor = prefill(model, Prompt.from_ids(IDS[::-1]))
    keep = torch.rand(3, model.geometry.n_kv_heads, 18, generator=torch.Generator().manual_seed(1)) > 0.5
    return [
        (),
        KVMask("needle"),
        KVMask((15, 21), queries="after", heads=[1, 4], beta=2.0),
        KVMask((2, N + 2), queries=[22], on_empty="zero"),
        KVMask((2, N + 2), queries=[23], on_empty="keep_self"),
        KeepMask(keep),
        ValueGate((3, 9), 0.5),
        KVPatch("needle", donor),
        KVPatch("needle", donor, [(9, 12)], what="k", heads=[0, 5]),
        KVPatch("needle", donor, [(9, 12)], what="v"),
        ResidualAblation("mlp", 1),
        ResidualAblation("block", 2),
        Inject.of(3.0, torch.ones(48), [1]),
        (KVMask("needle"), ValueGate((12, 15)), KVPatch((13, 15), donor)),
    ]


OPTIONS = {"suffix": SUFFIX, "continuation": [9], "generate": 2, "streams": 2}


@pytest.mark.slow
@every_family
def test_every_intervention_together_and_alone(family, devices, far, tiny):
    near, there = tiny(family), far(family, devices)
    reference = intervene(near, PROMPT, arms_of(near), **OPTIONS)
    with elsewhere.strict():
        arms = arms_of(there)
        together = intervene(there, PROMPT, arms, **OPTIONS)
        some = [2, 8]  # alone, because a batch in which layers differ shares less between them
        alone = [intervene(there, PROMPT, [arms[i]], **OPTIONS)[0] for i in some]
    for outs, theirs_too in ((together, reference), (alone, [reference[i] for i in some])):
        for mine, theirs in zip(outs, theirs_too, strict=True):
            assert isinstance(mine.logits, elsewhere.There)
            close(mine.logits, theirs.logits)
            close(mine.streams.resid_post, theirs.streams.resid_post)
            assert mine.generated == theirs.generated
            assert mine.receipt.cells_reached == theirs.receipt.cells_reached > 0 or not theirs.biases
            close(mine.receipt.retained, theirs.receipt.retained)


@every_family
def test_what_an_outcome_tells_afterwards(family, devices, far, tiny):
    mask = KVMask("needle", heads=[1, 2])
    kept = []
    for model in (tiny(family), far(family, devices)):
        with elsewhere.strict():
            clean, out = intervene(model, PROMPT, [(), mask], suffix=4, continuation=[9])
            parts = [getattr(out, name)(2) for name in ("attention", "own_attention", "corrected_attention", "keep")]
            own, conditional = out.attention_change(2, clean)
            kept.append([*parts, own.total, conditional.total, outcomes.kl_divergence(clean.logits, out.logits)])
    for theirs, mine in zip(*kept, strict=True):
        close(mine, theirs)


@every_family
def test_a_prefix_is_used_where_it_lies(family, devices, far, tiny):
    theirs = intervene(tiny(family), PROMPT, KVMask("needle"), suffix=4).logits
    with elsewhere.strict():
        model = far(family, devices)
        prefix = prefill(model, PROMPT, 12)
        close(intervene(model, PROMPT, KVMask("needle"), suffix=4, prefix=prefix).logits, theirs)
        rows = observe(model, PROMPT, [20], prefix=prefix).layer(1).attention
    close(rows, observe(tiny(family), PROMPT, [20]).layer(1).attention)


POLICIES = {
    "snapkv+two_stage": {"window": 4},
    "adakv+two_stage": {"window": 4},
    "h2o": {},
    "tova": {},
    "streaming": {},
    "knorm": {},
    "random": {"seed": 3},
    "obcache": {"window": 4},
    "expected_attention": {"n_future": 16},
}


@pytest.mark.parametrize(("name", "devices"), [("snapkv+two_stage", 1), *((name, 2) for name in POLICIES)])
def test_eviction_policies(name, devices, far, tiny):
    policy = eviction.policy(name, **POLICIES[name])
    wanted = policy.select(tiny("llama"), IDS, 0.5)
    with elsewhere.strict():
        model = far("llama", devices)
        keep = policy.select(model, IDS, 0.5)
        assert torch.equal(elsewhere.home(keep), wanted)
        live = eviction.chunked_prefill(model, IDS, policy, 0.5, 9)
    near = eviction.chunked_prefill(tiny("llama"), IDS, policy, 0.5, 9)
    assert torch.equal(elsewhere.home(live.keep), near.keep)


@pytest.mark.parametrize(("physical", "devices"), [(False, 2), (True, 1), (True, 2)])
def test_writing_from_an_evicted_cache(physical, devices, far, tiny):
    """Chunks of the context, then the cache while decoding: under masks, and packed."""
    policy, prompt = eviction.policy("knorm"), Prompt.from_ids(IDS)
    options = {"context": 20, "tokens": 4, "chunked": eviction.Chunked(7), "decode": eviction.Decode(2, 10)}
    theirs = eviction.generate(tiny("llama"), prompt, policy, 0.5, physical=physical, **options)
    with elsewhere.strict():
        mine = eviction.generate(far("llama", devices), prompt, policy, 0.5, physical=physical, **options)
    assert mine.ids == theirs.ids and torch.equal(elsewhere.home(mine.keep), theirs.keep)
    close(mine.logits, theirs.logits)


@placed
def test_a_packed_cache(devices, far, tiny):
    policy = eviction.policy("knorm")
    with elsewhere.strict():
        model = far("llama", devices)
        packed = eviction.compact(model, prefill(model, Prompt.from_ids(IDS)), policy.select(model, IDS, 0.5))
        logits, written = eviction.continue_from(model, packed, [5, 6], generate=3)
    near = tiny("llama")
    theirs = eviction.compact(near, prefill(near, Prompt.from_ids(IDS)), policy.select(near, IDS, 0.5))
    reference, ids = eviction.continue_from(near, theirs, [5, 6], generate=3)
    close(logits, reference)
    assert written == ids


def test_the_instrument_tells_devices_apart():
    """What the tests above rely on: mixing is an error, what CUDA allows is not."""
    here, there = torch.arange(6.0), elsewhere.There(torch.arange(6.0), elsewhere.device("meta"))
    third = there.to("meta:1")
    with elsewhere.strict():
        for mixed in (lambda: here + there, lambda: there + third, lambda: torch.cat([there, here]),
                      lambda: here[there.long()], lambda: there.masked_fill_(here > 2, 0.0)):  # fmt: skip
            with pytest.raises(elsewhere.MixedDevices):
                mixed()
        with pytest.raises(TypeError, match="NumPy"):
            np.asarray(there)
        assert str((there + torch.tensor(1.0)).device) == "meta:0" and str(third.device) == "meta:1"
        assert (there[torch.tensor([1, 2])] * 2).tolist() == [2.0, 4.0]
        assert torch.tensor([3], device=there.device).tolist() == [3]
        assert bool((there.cpu() == here).all()) and there.cpu().device == elsewhere.CPU

"""What a plan says, against what operations really hold: storages counted while the true model runs on true numbers."""

import pytest
import torch
from peak_memory import Peak

from kvprobe import KVMask, Prompt, engine, intervene, models, observe, prefill
from kvprobe.costs import Costs, Job, Step, from_config, hollow, peak
from kvprobe.costs.inside import Setting
from kvprobe.sizes import Limits

FAMILIES = ("llama", "gpt2", "mistral", "gemma2", "gpt_oss")
IDS = torch.randint(3, 320, (300,), generator=torch.Generator().manual_seed(0))
SMALL = Limits(logits_bytes=1 << 16)
CPU = torch.device("cpu")


def planned(model, job, limits):
    """What tensors hold; the holes that the C library's heap is granted hold none."""
    return peak(0, [step for step in model.costs.steps(job, limits) if step.name != "allocator"])


@pytest.mark.parametrize("limits", [Limits(), Limits(chunk=64), SMALL], ids=["whole", "chunks", "few logits"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_holds_what_the_plan_says(family, limits, tiny):
    model = tiny(family)
    engine.prefill(model.twin, IDS[:50], limits=limits)
    with Peak() as memory:
        engine.prefill(model.twin, IDS, limits=limits)
    assert 0.99 < planned(model, Job(300, queries=0), limits) / memory.peak < (1.35 if limits.chunk else 1.03)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_half_precision_counts_its_own_bytes(family, tiny_folder):
    model = models.load(tiny_folder(family), dtype=torch.bfloat16)
    with Peak() as memory:
        engine.prefill(model.twin, IDS)
    assert 0.99 < planned(model, Job(300, queries=0), Limits()) / memory.peak < 1.03


@pytest.mark.parametrize("keep_trace", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_arms_hold_at_most_what_the_plan_says(family, keep_trace, tiny):
    """Masks of a few keys gather less than the plan allows them, which are some copies of a chunk's logits."""
    model, prompt = tiny(family), Prompt.from_ids(IDS)
    shared = prefill(model, prompt)
    masks = [KVMask(keys=(start, start + 20)) for start in range(0, 160, 10)]
    limits = Limits(batch=8, logits_bytes=1 << 18)
    with Peak() as memory:
        intervene(model, prompt, masks, suffix=40, prefix=shared, plan=limits, keep_trace=keep_trace)
    said = planned(model, Job(300, 0, 16, 40, True, keep_trace), limits)
    assert 0.99 * memory.peak < said < memory.peak + 4 * limits.logits_bytes


def test_a_masked_half_of_the_cache_fits_too(tiny):
    model, prompt = tiny("llama"), Prompt.from_ids(IDS)
    shared = prefill(model, prompt)
    masks = [KVMask(keys=(start, start + 130)) for start in range(8)]
    limits = Limits(batch=8, logits_bytes=1 << 18)
    with Peak() as memory:
        intervene(model, prompt, masks, suffix=40, prefix=shared, plan=limits)
    assert memory.peak < planned(model, Job(300, 0, 8, 40, True), limits)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_flops_are_two_a_weight_and_token(family, tiny):
    """Every matrix is met once a token, the unembedding in one row only; a tied one is counted with it."""
    twin = tiny(family).twin
    inside = [
        p.numel() for name, p in twin.named_parameters() if p.dim() == 2 and (".layers." in name or ".h." in name)
    ]
    one = tiny(family).costs.run(Setting(1, 100, 0, 100, 1 << 20), 1)
    rotary = 0 if family == "gpt2" else 2 * 100 * 4  # positions × frequencies: by version a product, or elementwise
    assert one.flops - (2 * 100 * sum(inside) + 2 * 320 * 48) in (0, rotary)


def test_attention_flops_are_four_d_a_visible_pair(tiny):
    for family, windows in (("llama", (None,) * 3), ("mistral", (5,) * 3), ("gemma2", (5, None, 5))):
        steps = {step.name: step for step in tiny(family).costs.steps(Job(60, 0, 4, 20, True, batch=4), Limits())}
        one = tiny(family).costs.run(Setting(4, 20, 40, 20, 8 << 20, True), 0)
        pairs = sum(min(row + 1, window or 60) for window in windows for row in range(40, 60))
        assert steps["arms"].flops == one.flops + 4 * 4 * 8 * 6 * pairs


def test_a_config_alone_costs_what_the_loaded_model_costs(tiny):
    for family in FAMILIES:
        model = tiny(family)
        described = Costs(from_config(model.twin.config, torch.float32), CPU)
        job = Job(200, 3, 4, 20)
        assert described.steps(job, Limits()) == model.costs.steps(job, Limits())
        assert described.weights == model.costs.weights
        once = {t.untyped_storage().data_ptr(): t.numel() * 4 for t in model.twin.parameters()}
        assert abs(model.costs.weights - sum(once.values())) < 4096  # and a few buffers


def test_a_hollow_twin_holds_no_weights(tiny):
    twin = hollow(tiny("llama").twin)
    assert all(p.is_meta for p in twin.parameters()) and not any(p.is_meta for p in tiny("llama").twin.parameters())


def test_layers_are_streamed(tiny_folder, tmp_path):
    """Looking at all layers of a trace holds no more than looking at one."""
    import tiny as families

    model = models.load(families.save("llama", tmp_path / "deep", num_hidden_layers=8))
    trace = observe(model, Prompt.from_ids(IDS), slice(100, 300))
    peaks = []
    for layers in (1, 8):
        with Peak() as memory:
            for index in range(layers):
                trace.layer(index).attention.sum()
        peaks.append(memory.peak)
    assert peaks[1] <= 1.01 * peaks[0]


def test_the_peak_is_the_largest_total():
    steps = [Step("a", 5, held=True), Step("b", 7), Step("c", 3, held=True), Step("d", 1)]
    assert peak(10, steps) == 22 and peak(10, []) == 10 and peak(0, steps[2:]) == 4

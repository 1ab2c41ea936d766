"""The registered attention: what it leaves alone, what a run sees, and a twin in a user's own hands."""

import threading
from types import SimpleNamespace

import pytest
import tiny as families
import torch
from torch.testing import assert_close

from kvprobe import attention, engine
from kvprobe.attention import Run
from kvprobe.errors import ModelError
from kvprobe.interventions import KVMask
from kvprobe.interventions.plan import Scene, compile_arms

every_family = pytest.mark.parametrize("family", families.FAMILIES)
LENGTHS = (9, 14, 3)


def prompts(seed=0):
    """Three prompts of different lengths, alone and left-padded into one batch with its mask and positions."""
    g = torch.Generator().manual_seed(seed)
    alone = [torch.randint(3, 320, (n,), generator=g) for n in LENGTHS]
    width = max(LENGTHS)
    batch = torch.stack([torch.nn.functional.pad(ids, (width - len(ids), 0)) for ids in alone])
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in LENGTHS])
    return alone, batch, mask, (mask.cumsum(-1) - 1).clamp_min(0)


def test_registration_adds_one_name_and_replaces_none():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention.register()
    before = set(ALL_ATTENTION_FUNCTIONS)
    attention.register()
    assert set(ALL_ATTENTION_FUNCTIONS) == before and attention.NAME in before
    assert ALL_ATTENTION_FUNCTIONS[attention.NAME] is attention.attention_forward
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask


@every_family
def test_a_twin_in_a_users_hands_is_the_transformers_model(family, tiny, plain):
    """Left-padded batches too: a pad row sees nothing, and must not poison the rows that do."""
    twin = tiny(family).twin
    alone, batch, mask, positions = prompts()
    with torch.no_grad():
        padded = twin(input_ids=batch, attention_mask=mask, position_ids=positions).logits
        for row, ids in enumerate(alone):
            reference = plain(family)(ids).logits
            assert_close(twin(input_ids=ids[None]).logits[0], reference, atol=5e-5, rtol=1e-5)
            assert_close(padded[row, -len(ids) :], reference, atol=5e-5, rtol=1e-5)


@every_family
def test_a_twin_in_a_users_hands_caches(family, tiny, plain):
    twin, ids = tiny(family).twin, prompts()[0][1]
    with torch.no_grad():
        cache = twin(input_ids=ids[None, :8], use_cache=True).past_key_values
        rest = [twin(input_ids=ids[None, i : i + 1], past_key_values=cache, use_cache=True) for i in range(8, 14)]
    reference = plain(family)(ids).logits[8:]
    assert_close(torch.cat([out.logits[0] for out in rest]), reference, atol=5e-5, rtol=1e-5)


@every_family
def test_a_twin_in_a_users_hands_generates(family, tiny, plain):
    _, batch, mask, _ = prompts(3)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        mine, theirs = (m.generate(batch, **options) for m in (tiny(family).twin, plain(family).hf))
    assert torch.equal(mine, theirs)


@every_family
def test_a_float_mask_from_a_user_is_added(family, tiny, plain):
    n, twin = 9, tiny(family).twin
    ids = prompts()[0][0]
    bias = torch.zeros(3, 6, n, n)
    bias[..., 4:, 2] = -torch.inf
    reference = plain(family)(ids, bias).logits
    mask = torch.zeros(n, n).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    mask[4:, 2] = -torch.inf
    windows = [window or n for window in plain(family).windows]
    outside = {w: torch.ones(n, n, dtype=torch.bool).tril(-w) for w in windows}
    modules = [m for m in twin.modules() if hasattr(m, "layer_idx") and (hasattr(m, "o_proj") or hasattr(m, "c_proj"))]

    def give(module, args, kwargs):
        own = mask.masked_fill(outside[windows[module.layer_idx]], -torch.inf)
        return args, kwargs | {"attention_mask": own[None, None]}

    handles = [module.register_forward_pre_hook(give, with_kwargs=True) for module in modules]
    try:
        with torch.no_grad():
            assert_close(twin(input_ids=ids[None]).logits[0], reference, atol=5e-5, rtol=1e-5)
    finally:
        for handle in handles:
            handle.remove()


@every_family
def test_the_bridges_model_stays_eager(family, tiny):
    original = tiny(family).bridge.original_model
    assert original.config._attn_implementation == "eager"
    assert tiny(family).twin.config._attn_implementation == attention.NAME


def test_a_run_serves_the_pass_it_is_active_for_and_no_other():
    assert attention._ACTIVE.get() is None
    outer, inner = Run(), Run()
    with attention.active(outer):
        with attention.active(inner):
            assert attention._ACTIVE.get() is inner
        assert attention._ACTIVE.get() is outer
        seen = []
        thread = threading.Thread(target=lambda: seen.append(attention._ACTIVE.get()))
        thread.start()
        thread.join()
        assert seen == [None]
    assert attention._ACTIVE.get() is None


@every_family
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_inside_a_run_leaves_nothing_active(family, error, tiny, plain, monkeypatch):
    model, ids = tiny(family), prompts()[0][0]

    def fail(*a, **k):
        assert attention._ACTIVE.get() is not None
        raise error("inside")

    with monkeypatch.context() as patch:
        patch.setattr(attention, "_two_part", fail)
        patch.setattr(attention, "_sdpa", fail)
        with pytest.raises(error, match="inside"):
            engine.prefill(model.twin, ids)
    assert attention._ACTIVE.get() is None
    assert_close(engine.prefill(model.twin, ids)[0].next_logits, plain(family)(ids).logits[-1], atol=5e-5, rtol=1e-5)
    assert hooks_of(model.twin) == []


def hooks_of(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return [(name, kind) for name, module in model.named_modules() for kind in kinds if getattr(module, kind, None)]


def test_a_clean_prefill_of_a_plain_family_is_sdpa_throughout(tiny, monkeypatch):
    monkeypatch.setattr(attention, "_two_part", lambda *a: pytest.fail("two-part attention without need"))
    for family in ("gpt2", "llama"):
        engine.prefill(tiny(family).twin, prompts()[0][0], torch.tensor([3]))
    with pytest.raises(pytest.fail.Exception):
        engine.prefill(tiny("mistral").twin, prompts()[0][0])


def test_only_masked_layers_leave_the_sdpa_path(tiny, monkeypatch):
    ids, seen = prompts()[0][0], []
    two_part = attention._two_part
    monkeypatch.setattr(attention, "_two_part", lambda *a: seen.append(a[5]) or two_part(*a))
    scene = Scene(len(ids), len(ids), 3, 6, (None,) * 3)
    plan = compile_arms([[KVMask((2, 3), layers=1)]], scene)
    run = Run(biases=plan.select([0]))
    engine.forward(tiny("llama").twin, ids[None], run, engine.new_cache())
    assert seen == [1] and sorted(run.records) == [1] and sorted(run.specs) == [0, 1, 2]


@every_family
def test_a_run_learns_scale_window_cap_and_sinks(family, tiny):
    model, run = tiny(family), Run(capture=torch.tensor([1, 4]))
    engine.forward(model.twin, prompts()[0][0][None], run, engine.new_cache())
    assert [run.specs[i].window for i in range(3)] == list(model.geometry.windows)
    assert {run.specs[i].softcap for i in range(3)} == ({2.0} if family == "gemma2" else {None})
    assert all(abs(run.specs[i].scale - 8**-0.5) < 1e-9 for i in range(3))
    sinks = [run.specs[i].sink for i in range(3)]
    assert all((sink is not None) == (family == "gpt_oss") for sink in sinks)
    assert all(not sink.requires_grad and sink.shape == (6,) for sink in sinks if sink is not None)
    assert all(run.queries[i].shape == (1, 6, 2, 8) for i in range(3))


def test_a_position_bias_inside_attention_is_refused_in_a_run():
    x = torch.randn(1, 2, 3, 4)
    module = SimpleNamespace(layer_idx=0)
    with attention.active(Run()), pytest.raises(ModelError, match="SimpleNamespace adds a position bias"):
        attention.attention_forward(module, x, x, x, None, position_bias=torch.zeros(1, 2, 3, 3))

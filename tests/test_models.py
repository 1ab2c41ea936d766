"""load(): one copy of the weights, a twin that is used only if it can be trusted, and one line for every refusal."""

import json
import random

import pytest
import tiny as families
import torch
from torch.testing import assert_close

from kvprobe import KVMask, Prompt, intervene, models, observe, sources
from kvprobe.errors import InterventionError

every_family = pytest.mark.parametrize("family", families.FAMILIES)
WINDOWS = {
    "gpt2": (None,) * 3,
    "llama": (None,) * 3,
    "mistral": (5,) * 3,
    "gemma2": (5, None, 5),
    "gpt_oss": (6, None, 6),
}


@every_family
def test_geometry(family, tiny):
    geometry = tiny(family).geometry
    kv_heads = 6 if family == "gpt2" else 2
    assert (geometry.n_layers, geometry.n_heads, geometry.n_kv_heads, geometry.group) == (3, 6, kv_heads, 6 // kv_heads)
    assert (geometry.head_dim, geometry.d_model, geometry.vocab) == (8, 48, 320)
    assert geometry.windows == WINDOWS[family]
    assert geometry.softcaps == ((2.0 if family == "gemma2" else None),) * 3
    assert geometry.has_sink == (family == "gpt_oss")


@every_family
def test_facts_about_a_model(family, tiny):
    model = tiny(family)
    assert model.name == family and model.max_length == 512
    assert model.device == torch.device("cpu") and model.dtype == torch.float32
    assert model.meta == {
        "model": family,
        "dtype": "float32",
        "processing": "raw",
        "versions": dict(model.report.versions),
    }
    assert json.loads(json.dumps(model.meta)) == model.meta
    assert model.decode([1, 75, 76]) == "<s>" + model.tokenizer.decode([75, 76])


def storages(*modules):
    tensors = (t for module in modules for t in (*module.parameters(), *module.buffers()))
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@every_family
def test_the_weights_exist_once(family, tiny, plain):
    """The twin's tensors are the bridge's, and all together take the bytes of one transformers model.

    (TransformerLens adds one vector of zeros: the unembedding bias that these models do not have.)
    """
    model, once = tiny(family), storages(plain(family).hf)
    original = model.bridge.original_model
    assert {t.data_ptr() for t in model.twin.parameters()} <= {t.data_ptr() for t in original.parameters()}
    assert {t.data_ptr() for t in model.twin.buffers()} <= {t.data_ptr() for t in original.buffers()}
    assert sorted(storages(model.twin).values()) == sorted(once.values())
    assert sum(storages(model.twin, model.bridge, original).values()) == sum(once.values()) + 320 * 4


@every_family
def test_the_twin_is_the_same_class_with_another_attention(family, tiny):
    model = tiny(family)
    assert type(model.twin) is type(model.bridge.original_model)
    assert model.twin.config is not model.bridge.original_model.config
    assert model.bridge.original_model.config._attn_implementation == "eager"
    assert not model.twin.training and model.twin is not model.bridge.original_model


def test_a_change_of_a_weight_shows_in_twin_and_bridge(tiny_folder):
    model = models.load(tiny_folder("llama"))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = model.twin(input_ids=ids).logits
        model.twin.lm_head.weight.mul_(2)
        assert_close(model.twin(input_ids=ids).logits, before * 2)
        assert_close(model.bridge(ids, prepend_bos=False), before * 2, atol=1e-4, rtol=1e-4)


@every_family
def test_bridge_and_twin_compute_what_transformers_computes(family, tiny, plain):
    model, ids = tiny(family), torch.randint(3, 320, (1, 20), generator=torch.Generator().manual_seed(2))
    reference = plain(family)(ids[0]).logits
    with torch.no_grad():
        assert_close(model.bridge(ids, prepend_bos=False)[0], reference, atol=5e-5, rtol=1e-5)
        assert_close(model.twin(input_ids=ids).logits[0], reference, atol=5e-5, rtol=1e-5)


def test_loading_changes_nothing_outside(tiny_folder):
    from transformers.utils import logging

    torch.manual_seed(11)
    random.seed(11)
    expected = torch.rand(3), random.random()
    torch.manual_seed(11)
    random.seed(11)
    bars, dtype, grad = logging.is_progress_bar_enabled(), torch.get_default_dtype(), torch.is_grad_enabled()
    models.load(tiny_folder("llama"))
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]
    assert (logging.is_progress_bar_enabled(), torch.get_default_dtype(), torch.is_grad_enabled()) == (
        bars,
        dtype,
        grad,
    )


def test_two_loads_are_two_models_that_agree(tiny_folder):
    first, second = models.load(tiny_folder("gpt2")), models.load(str(tiny_folder("gpt2")))
    prompt = Prompt.from_ids([5, 6, 7, 8])
    assert first.twin is not second.twin
    assert not {t.data_ptr() for t in first.twin.parameters()} & {t.data_ptr() for t in second.twin.parameters()}
    outs = [intervene(model, prompt, KVMask((0, 2)), suffix=1).logits for model in (first, second)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", torch.float16])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "gpt2"])
def test_half_precision(family, dtype, tiny_folder):
    """Against the same rounded weights in fp32: at most twice as far off as transformers' own half precision is."""
    from oracles import Cutout, Plain, bias_table

    model = models.load(tiny_folder(family), dtype=dtype)
    half = model.dtype
    assert half == (getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    reference, naive = Plain(tiny_folder(family)), Plain(tiny_folder(family), half)
    for mine, rounded in zip(reference.hf.parameters(), naive.hf.parameters(), strict=True):
        mine.data.copy_(rounded.data)
    ids = torch.randint(3, 320, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    cutout = Cutout(((9, 12),), (0, 1, 2), dict.fromkeys(range(3), tuple(range(6))), "after")
    table = bias_table([cutout], 20, n=20, suffix=8, n_layers=3, n_heads=6)
    out = intervene(model, Prompt.from_ids(ids), [(), KVMask((9, 12), queries="after")], suffix=8)
    for outcome, bias in zip(out, (torch.zeros_like(table), table), strict=True):
        assert outcome.logits.dtype == half and not outcome.logits.isnan().any()
        truth = reference(ids, bias).logits[-8:]
        budget = (naive(ids, bias).logits[-8:].float() - truth).abs()
        error = (outcome.logits.float() - truth).abs()
        assert float(error.max()) < 2 * float(budget.max()) and float(error.mean()) < 2 * float(budget.mean())
        assert outcome.receipt.masked_weight == 0 and outcome.receipt.retained.dtype == torch.float32
    rows = observe(model, Prompt.from_ids(ids), [12]).layer(0).attention
    assert rows.dtype == torch.float32
    assert_close(rows, reference(ids).attention[0][:, [12]], atol=2e-2, rtol=0)


@pytest.mark.parametrize("suffix", [0, 5, -1, 2.0, "2"])
def test_a_scene_has_a_suffix_that_fits(suffix, tiny):
    prompt = Prompt.from_ids([0, 0, 5, 6, 7, 8], {"a": (3, 5)}, attention_mask=[0, 0, 1, 1, 1, 1])
    scene = tiny("mistral").scene(prompt, 3)
    assert (scene.n, scene.suffix, scene.offset, scene.windows) == (4, 3, 2, (5, 5, 5))
    assert scene.spans == (("a", (3, 5)),) and tiny("mistral").scene(prompt).suffix == 0
    with pytest.raises(InterventionError, match=r"suffix=.* is not allowed: give a whole number, 1 … 4"):
        tiny("mistral").scene(prompt, suffix)


def test_the_embedded_model_goes_by_its_names(smol, monkeypatch, tiny_folder):
    from kvprobe import embedded

    assert smol.name == "smollm2-135m" and smol.geometry.group == 3 and smol.geometry.n_layers == 30
    monkeypatch.setattr(embedded, "ensure", lambda: tiny_folder("llama"))
    for name in ("smollm2-135m", "SmolLM2-135M-Instruct"):
        assert sources.resolve(name) == (str(tiny_folder("llama")), "smollm2-135m")

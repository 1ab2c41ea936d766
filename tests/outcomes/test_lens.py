"""The logit lens: plain transformers' hidden states through a norm and head written out by hand."""

import gc
import weakref
from types import SimpleNamespace

import catalogue
import pytest
import torch
from oracles import Plain
from plain_lens import lens_by_hand, uneven
from plain_streams import plain_streams
from tiny import FAMILIES, HEADS, SIZES
from torch.testing import assert_close

from kvprobe import Prompt, intervene, models
from kvprobe.errors import CapabilityError, TheoryError
from kvprobe.interventions import KVMask
from kvprobe.outcomes import Lens, lens_logits

families = pytest.mark.parametrize("family", FAMILIES)
IDS = catalogue.ids(1, 12)


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """Family → folder of a tiny model whose norms have weights of their own."""
    made = {}

    def find(family):
        if family not in made:
            made[family] = uneven(tiny_folder(family), tmp_path_factory.mktemp("uneven") / family)
        return made[family]

    return find


@pytest.fixture(scope="module")
def loaded(folder):
    """Family → that model as kvprobe loads it."""
    made = {}

    def find(family):
        if family not in made:
            made[family] = models.load(folder(family))
        return made[family]

    return find


def duck(hf, d_model=48):
    """What a lens needs of a model, for classes that are not loaded otherwise."""
    twin = models.make_twin(hf.eval())
    geometry = SimpleNamespace(n_layers=hf.config.num_hidden_layers, d_model=d_model)
    return SimpleNamespace(name="tiny", twin=twin, geometry=geometry, dtype=next(hf.parameters()).dtype)


@families
def test_every_layer_is_a_norm_and_a_head_by_hand(family, folder, loaded):
    plain = Plain(folder(family))
    _, resid = plain_streams(plain, IDS)
    mine = lens_logits(loaded(family), resid)
    assert mine.dtype == torch.float32
    assert_close(mine.double(), lens_by_hand(family, plain.hf, resid), atol=2e-5, rtol=1e-5)
    assert_close(mine[-1], plain(IDS).logits, atol=2e-4, rtol=1e-4)
    assert float((mine[0] - mine[-1]).abs().max()) > 0.5
    assert Lens.of(loaded(family)).max_diff <= 5e-4


@families
def test_the_last_of_transformers_hidden_states_is_normed_already(family, folder, loaded):
    plain = Plain(folder(family))
    with torch.no_grad():
        out = plain.hf(input_ids=torch.tensor([IDS]), output_hidden_states=True)
    *earlier, last = (hidden[0] for hidden in out.hidden_states[1:])
    _, resid = plain_streams(plain, IDS)
    assert_close(torch.stack(earlier), resid[:-1], atol=1e-5, rtol=1e-5)
    lens = Lens.of(loaded(family))
    assert_close(lens._head(last), lens_by_head(family, plain.hf, last), atol=1e-4, rtol=1e-4)
    assert float((lens(last) - out.logits[0]).abs().max()) > 0.3  # the norm a second time
    assert_close(lens(resid[-1]), out.logits[0], atol=2e-4, rtol=1e-4)


def lens_by_head(family, hf, normed):
    """Logits before a soft-cap, from what has been normed."""
    return normed @ (hf.transformer.wte if family == "gpt2" else hf.lm_head).weight.T


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_in_fp32(family, dtype, folder, monkeypatch):
    """Weights and hidden states as they are stored, everything behind them in fp32; the head is upcast in blocks."""
    monkeypatch.setattr("kvprobe.outcomes.lens.HEAD_BYTES", 48 * 4 * 33)
    plain = Plain(folder(family))
    resid = plain_streams(plain, IDS)[1].to(dtype)
    model = duck(plain.hf.to(dtype))
    mine, exact = lens_logits(model, resid), lens_by_hand(family, model.twin, resid).detach()
    assert mine.dtype == torch.float32
    assert_close(mine.double(), exact, atol=5e-5, rtol=2e-5)
    spacing = torch.finfo(dtype).eps * float(exact.abs().max())
    assert Lens.of(model).max_diff <= 8 * spacing
    assert all(parameter.dtype == dtype for parameter in model.twin.parameters())  # the copies are the lens's own


def other_classes():
    """Classes that do something of their own behind the last layer."""
    import transformers as t

    common = {**SIZES, **HEADS}
    bare = {name: value for name, value in common.items() if name not in ("num_key_value_heads", "head_dim")}
    small = {**common, "layer_types": ["full_attention"] * 3}
    return {
        "cohere": t.CohereForCausalLM(t.CohereConfig(**common, logit_scale=0.3, pad_token_id=0)),
        "granite": t.GraniteForCausalLM(t.GraniteConfig(**common, logits_scaling=7.0, attention_multiplier=0.3)),
        "gemma3": t.Gemma3ForCausalLM(t.Gemma3TextConfig(**small, final_logit_softcapping=2.0)),
        "gpt_neox": t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**bare)),
        "opt": t.OPTForCausalLM(
            t.OPTConfig(**bare, ffn_dim=64, word_embed_proj_dim=20, do_layer_norm_before=True, pad_token_id=0)
        ),
        "phi": t.PhiForCausalLM(t.PhiConfig(**bare)),
    }


@pytest.fixture(scope="module")
def others():
    torch.manual_seed(0)
    made = other_classes()
    for hf in made.values():
        with torch.no_grad():
            for parameter in hf.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return made


@pytest.mark.parametrize("name", ["cohere", "granite", "gemma3", "gpt_neox", "opt", "phi"])
def test_scales_soft_caps_biases_and_projections_behind_the_norm(name, others):
    """Against the class's own logits with its last layer's output replaced by each layer's."""
    hf = others[name]
    lens = Lens.of(duck(hf))
    layers = next(m for m in hf.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 3)
    ids, kept = torch.tensor([IDS]), []
    for layer in range(3):
        handles = [layers[layer].register_forward_hook(lambda m, a, out: kept.append(out))]
        if layer < 2:
            handles.append(layers[2].register_forward_hook(lambda m, a, out: kept[-1]))
        with torch.no_grad():
            expected = hf(input_ids=ids, use_cache=False).logits[0]
        for handle in handles:
            handle.remove()
        hidden = kept[-1] if isinstance(kept[-1], torch.Tensor) else kept[-1][0]
        assert_close(lens(hidden[0]), expected, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_proven_is_refused(others, tiny_folder):
    from transformers import AutoModelForCausalLM

    fresh = lambda: AutoModelForCausalLM.from_pretrained(tiny_folder("llama"))  # noqa: E731
    lying = duck(fresh())
    lying.twin.config.logit_scale = 0.5  # named, but no class of that kind
    wrapped = duck(fresh())
    wrapped.twin.lm_head = torch.nn.Sequential(wrapped.twin.lm_head)
    skewed = duck(fresh())
    skewed.twin.model.norm.register_forward_hook(lambda module, args, out: out)
    skewed.twin.lm_head.register_forward_hook(lambda module, args, out: out + 1)
    broken = duck(fresh())
    broken.geometry.d_model = 47
    for model, reason in (
        (lying, r"through LlamaRMSNorm, Linear differ from the model's own logits by .* \(tolerance 0\.0005\)"),
        (skewed, r"differ from the model's own logits by 1 \(tolerance"),
        (
            wrapped,
            r"LlamaRMSNorm, Sequential runs behind the last layer; allowed: modules that end in a floating-point",
        ),
        (broken, r"TheoryError: hidden states are float32 \[8, 48\]; allowed: floating point, \[\.\.\., 47\]"),
    ):
        with pytest.raises(CapabilityError, match=rf"tiny \(LlamaForCausalLM\) has no logit lens .*{reason}") as caught:
            Lens.of(model)
        assert "\n" not in str(caught.value)
        assert len(model.twin.lm_head._forward_pre_hooks) == len(model.twin.model.norm._forward_pre_hooks) == 0


def test_hidden_states_that_do_not_fit_are_refused(tiny):
    for wrong, says in (
        (torch.zeros(2, 47), r"float32 \[2, 47\]"),
        (torch.zeros(48, dtype=torch.long), r"int64 \[48\]"),
    ):
        with pytest.raises(TheoryError, match=rf"hidden states are {says}; allowed: floating point, \[\.\.\., 48\]"):
            lens_logits(tiny("llama"), wrong)
    assert lens_logits(tiny("llama"), torch.zeros(0, 48)).shape == (0, 320)


def test_a_lens_is_proven_once_and_goes_with_its_model(tiny_folder, monkeypatch):
    from transformers import AutoModelForCausalLM

    model = duck(AutoModelForCausalLM.from_pretrained(tiny_folder("llama")))
    first = Lens.of(model)
    monkeypatch.setattr("kvprobe.outcomes.lens._prove", lambda model: pytest.fail("proven twice"))
    assert Lens.of(model) is first
    shared = {parameter.data_ptr() for parameter in model.twin.parameters()}
    assert {first.weight.data_ptr(), first.modules[0].weight.data_ptr()} <= shared  # fp32: nothing is copied
    gone = weakref.ref(first)
    del model, first
    gc.collect()
    assert gone() is None


@families
def test_the_lens_of_an_arms_last_layer_is_its_logits(family, loaded):
    """Any run's, masked ones included: no hidden state of a mask reaches behind the layers."""
    arms = [KVMask(keys=[]), KVMask(keys=(2, 7))]
    model = loaded(family)
    for out in intervene(model, Prompt.from_ids(IDS), arms, suffix=4, continuation=[9, 41], streams=6):
        assert_close(lens_logits(model, out.streams.resid_post[-1]), out.logits.float(), atol=1e-4, rtol=1e-4)

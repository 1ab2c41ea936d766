"""The capability check: what it reports of good models, and that every kind of bad one is refused by name."""

import copy
import json

import pytest
import tiny as families
import torch

from kvprobe import attention, checks, engine, models
from kvprobe.errors import CapabilityError, ModelError

every_family = pytest.mark.parametrize("family", families.FAMILIES)
DIFFERENCES = ("logits_max_diff", "twin_max_diff", "cached_max_diff", "mask_max_diff", "output_max_diff")


@every_family
def test_a_good_model_is_reported(family, tiny):
    report = tiny(family).report
    assert report.ok and report.model == family and report.tolerance == 5e-4
    for name in DIFFERENCES:
        assert 0 <= getattr(report, name) < 1e-4
    assert 0 <= report.pattern_max_diff < 1e-5 and 0 <= report.row_sum_max_error < 1e-5
    assert report.shared_parameters == len(list(tiny(family).twin.parameters()))
    assert report.attention.startswith("sdpa" if family in ("gpt2", "llama") else "exact, in chunks")
    assert report.processing == "raw" and {"torch", "transformers", "transformer-lens"} <= set(report.versions)
    for index, layer in enumerate(report.layers):
        assert layer.index == index and layer.maskable and "Attention" in layer.kind
        assert layer.window == tiny(family).geometry.windows[index] and layer.sink == (family == "gpt_oss")
        assert layer.softcap == tiny(family).geometry.softcaps[index]
    assert json.loads(json.dumps(report.to_dict()))["layers"][2]["index"] == 2


@every_family
def test_the_probe_is_longer_than_a_small_window(family, plain):
    ids = checks.probe_ids(plain(family).hf)
    assert torch.equal(ids, checks.probe_ids(plain(family).hf))
    window = max(w or 0 for w in plain(family).windows)
    assert ids.shape == (1, window + 12 if window else 16) and int(ids.max()) < 320


def refused(folder, says, layer_class=True):
    with pytest.raises(CapabilityError, match=says) as caught:
        models.load(folder)
    message = str(caught.value)
    assert message.startswith("llama (LlamaForCausalLM): ") and "\n" not in message
    assert "transformers 5." in message and "transformer-lens 4." in message
    assert attention._ACTIVE.get() is None
    return message


@pytest.fixture
def llama(tiny_folder):
    return tiny_folder("llama")


def test_a_bridge_that_ignores_its_cache_is_refused(llama, monkeypatch):
    """What transformers 5.24 does to TransformerLens 4.3, here by dropping the argument."""
    from transformer_lens.model_bridge import TransformerBridge

    forward = TransformerBridge.forward

    def forgetful(self, *args, **kwargs):
        kwargs.pop("past_key_values", None)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(TransformerBridge, "forward", forgetful)
    message = refused(llama, "a cached run differs from an uncached one by [0-9.]+")
    assert "mistakes the KV cache" in message and "install transformers>=5.9,<5.24" in message


def test_a_twin_that_ignores_its_prefix_is_refused(llama, monkeypatch):
    cached = checks._cached_twin
    monkeypatch.setattr(checks, "_cached_twin", lambda twin, ids, cut: cached(twin, ids, cut).roll(1, 0))
    refused(llama, "a cached run differs")


@pytest.mark.parametrize("which", ["_cached_twin", "_cached_bridge"])
def test_nan_is_no_small_difference(llama, monkeypatch, which):
    real = getattr(checks, which)
    monkeypatch.setattr(checks, which, lambda *a: real(*a) * torch.nan)
    refused(llama, "a cached run differs from an uncached one by nan")


def test_nan_in_one_layer_of_many_is_no_small_difference(llama, monkeypatch):
    rows, seen = checks._rows, []

    def poisoned(*a):
        seen.append(1)
        pattern, sums = rows(*a)
        return (pattern * torch.nan, sums) if len(seen) == 2 else (pattern, sums)

    monkeypatch.setattr(checks, "_rows", poisoned)
    refused(llama, "attention rows differ from TransformerLens' by nan")


@pytest.mark.parametrize("layers", [[0, 1, 2], [1]])
def test_a_bridge_that_drops_score_edits_is_refused(llama, monkeypatch, layers):
    real, made = checks.score_hook, []

    def dropping(bias, scene):
        made.append(1)
        return (lambda scores, hook: scores) if len(made) - 1 in layers else real(bias, scene)

    monkeypatch.setattr(checks, "score_hook", dropping)
    refused(llama, rf"a score edit does not bite on layer\(s\) \{layers} \(\w*Attention\w*\): TransformerLens' adapter")


def test_a_bridge_that_edits_a_finished_pattern_is_refused(llama, monkeypatch):
    """The masked key's weight is 0, but the others were not renormalised."""
    keep = checks._keep_pattern

    def edited(patterns, layer, pattern, hook):
        short = pattern.clone()
        short[..., checks.MASKED_KEY] = 0
        keep(patterns, layer, short, hook)

    monkeypatch.setattr(checks, "score_hook", lambda bias, scene: lambda scores, hook: scores)
    monkeypatch.setattr(checks, "_keep_pattern", edited)
    refused(llama, r"a score edit does not bite on layer\(s\) \[0, 1, 2\]")


def test_a_family_whose_adapter_drops_score_edits_is_refused(tmp_path):
    from transformers import AutoModelForCausalLM, OPTConfig

    config = OPTConfig(vocab_size=320, hidden_size=48, word_embed_proj_dim=48, ffn_dim=64, num_hidden_layers=2,
                       num_attention_heads=6, max_position_embeddings=64)  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        CapabilityError, match=r"\(OPTForCausalLM\): a score edit does not bite on layer\(s\) \[0, 1\] "
    ):
        models.load(tmp_path)


def test_a_long_window_that_attention_does_not_pass_on_is_refused(tmp_path):
    """Qwen2-MoE's window lives in its mask alone; a probe shorter than the window would never notice."""
    from transformers import AutoModelForCausalLM, Qwen2MoeConfig

    config = Qwen2MoeConfig(
        vocab_size=320, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, num_experts=4, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, num_experts_per_tok=2, use_sliding_window=True, sliding_window=100,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(CapabilityError, match=r"layer\(s\) \[0, 2\] slide over 100 tokens, but their attention call"):
        models.load(tmp_path)


def with_twin(monkeypatch, change):
    make = models.make_twin
    monkeypatch.setattr(models, "make_twin", lambda hf: change(make(hf), hf))


def test_a_twin_that_computes_something_else_is_refused(llama, monkeypatch):
    def rescaled(twin, hf):
        twin.model.layers[1].self_attn.scaling *= 1.1
        return twin

    with_twin(monkeypatch, rescaled)
    refused(llama, "the twin's logits differ by")


def test_a_twin_with_its_own_weights_is_refused(llama, monkeypatch):
    with_twin(monkeypatch, lambda twin, hf: copy.deepcopy(twin))
    refused(llama, "only 0 of 30 parameters are shared with the twin")


def test_a_layer_that_does_not_call_the_registered_function_is_refused(llama, monkeypatch):
    def stubborn(twin, hf):
        attn = twin.model.layers[1].self_attn
        attn.config = copy.deepcopy(attn.config)
        attn.config._attn_implementation = "eager"
        return twin

    with_twin(monkeypatch, stubborn)
    refused(llama, r"only layers \[0, 2\] of 3 called the registered attention function")


def test_a_bridge_that_computes_something_else_is_refused(llama, monkeypatch):
    real = checks._bridge_logits
    monkeypatch.setattr(checks, "_bridge_logits", lambda bridge, ids: real(bridge, ids) + 0.01)
    refused(llama, r"TransformerLens' logits differ by 0\.01 \(tolerance 0\.0005\)")


def test_an_output_projection_of_another_layout_is_refused(llama, monkeypatch):
    real = engine.output_weights
    monkeypatch.setattr(engine, "output_weights", lambda module, heads: real(module, heads).flip(0))
    refused(llama, "the output projection is not a plain one: z W_O is off by")


def test_a_fast_path_that_masks_something_else_is_refused(llama, monkeypatch):
    real = checks._twin_masked
    monkeypatch.setattr(checks, "_twin_masked", lambda *a: real(*a) + 0.002)
    refused(llama, r"under a mask the fast path differs from hooks by 0\.002")


def test_rows_that_differ_are_refused(llama, monkeypatch):
    real = checks._rows
    with monkeypatch.context() as patch:
        patch.setattr(checks, "_rows", lambda *a: (real(*a)[0] * 0.999, real(*a)[1]))
        refused(llama, "attention rows differ from TransformerLens' by")
    monkeypatch.setattr(checks, "_rows", lambda *a: (real(*a)[0], real(*a)[1] - 0.001))
    refused(llama, r"attention rows miss a sum of 1 by 0\.001")


def test_a_model_with_sinks_on_some_layers_only_is_refused(tiny_folder, monkeypatch):
    real = attention.attention_forward

    def some(module, *args, **kwargs):
        return real(module, *args, **kwargs | ({"s_aux": None} if module.layer_idx == 1 else {}))

    monkeypatch.setattr(attention, "attention_forward", some)
    with pytest.raises(ModelError, match="some layers have learned sinks and some do not"):
        models.load(tiny_folder("gpt_oss"))
    monkeypatch.undo()
    attention.register()


def test_a_failing_check_leaves_no_hook(llama, monkeypatch):
    twins = []
    with_twin(monkeypatch, lambda twin, hf: twins.append(twin) or twin)
    monkeypatch.setattr(engine, "forward", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        models.load(llama)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in twins[0].modules())


@every_family
def test_a_good_model_keeps_no_hook(family, tiny):
    assert all(not module._forward_hooks for module in tiny(family).twin.modules())


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, 5e-4), (torch.bfloat16, 8 * 2**-7 * 10), (torch.float16, 8 * 2**-10 * 10)]
)
def test_tolerance_follows_the_dtype(dtype, expected):
    assert checks._tolerance(torch.tensor([-10.0, 3.0]), dtype) == pytest.approx(expected)

"""The capability check: what it reports of good models, and that every kind of bad one is refused by name."""

import copy
import json
import math

import pytest
import tiny as families
import torch

from kvprobe import attention, capability, checks, cli, engine, models, sources
from kvprobe.checks import check, distance, trials
from kvprobe.errors import CapabilityError
from kvprobe.versions import versions

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
    assert "mistakes the KV cache" in message and "install" not in message  # these versions are the right ones
    found = versions() | {"transformers": "5.24.0"}
    monkeypatch.setattr(check, "versions", lambda *names: {name: found[name] for name in names or found})
    message = refused(llama, "a cached run differs from an uncached one by [0-9.]+")
    assert "mistakes the KV cache" in message and "install transformers>=5.9,<5.24" in message


def test_a_twin_that_ignores_its_prefix_is_refused(llama, monkeypatch):
    cached = trials.cached_twin
    monkeypatch.setattr(trials, "cached_twin", lambda twin, ids, cut: cached(twin, ids, cut).roll(1, 0))
    refused(llama, "a cached run differs")


@pytest.mark.parametrize("which", ["cached_twin", "cached_bridge", "given_bridge"])
def test_nan_is_no_small_difference(llama, monkeypatch, which):
    real = getattr(trials, which)
    monkeypatch.setattr(trials, which, lambda *a: real(*a) * torch.nan)
    refused(llama, "a cached run differs from an uncached one by nan")


def test_nan_in_one_layer_of_many_is_no_small_difference(llama, monkeypatch):
    rows, seen = trials.rows, []

    def poisoned(*a):
        seen.append(1)
        pattern, sums = rows(*a)
        return (pattern * torch.nan, sums) if len(seen) == 2 else (pattern, sums)

    monkeypatch.setattr(trials, "rows", poisoned)
    refused(llama, "attention rows differ from TransformerLens' by nan")


@pytest.mark.parametrize("layers", [[0, 1, 2], [1]])
def test_a_bridge_that_drops_score_edits_is_refused(llama, monkeypatch, layers):
    real, made = trials.score_hook, []

    def dropping(bias, scene):
        made.append(1)
        return (lambda scores, hook: scores) if len(made) - 1 in layers else real(bias, scene)

    monkeypatch.setattr(trials, "score_hook", dropping)
    refused(llama, rf"a score edit does not bite on layer\(s\) \{layers} \(\w*Attention\w*\): TransformerLens' adapter")


def test_a_bridge_that_edits_a_finished_pattern_is_refused(llama, monkeypatch):
    """The masked key's weight is 0, but the others were not renormalised."""
    keep = trials.keep_pattern

    def edited(patterns, layer, pattern, hook):
        short = pattern.clone()
        short[..., trials.MASKED_KEY] = 0
        keep(patterns, layer, short, hook)

    monkeypatch.setattr(trials, "score_hook", lambda bias, scene: lambda scores, hook: scores)
    monkeypatch.setattr(trials, "keep_pattern", edited)
    refused(llama, r"a score edit does not bite on layer\(s\) \[0, 1, 2\]")


def test_a_family_whose_adapter_drops_score_edits_is_refused(tmp_path):
    """OPT: TransformerLens leaves attention to transformers, and drops edits of scores and of finished patterns."""
    folder = families.save("opt", tmp_path)
    with pytest.raises(
        CapabilityError, match=r"\(OPTForCausalLM\): a score edit does not bite on layer\(s\) \[0, 1, 2\] "
    ):
        models.load(folder)
    hf, tokenizer = sources.from_transformers(str(folder), "opt", None, False, {})
    bridge, ids = models._boot(str(folder), hf, tokenizer, "opt"), torch.arange(5, 25)[None]
    with torch.no_grad():
        clean = bridge(ids, prepend_bos=False)
        for name in ("hook_attn_scores", "hook_pattern"):
            hooks = [(f"blocks.{layer}.attn.{name}", lambda tensor, hook: tensor * 0) for layer in range(3)]
            assert torch.equal(bridge.run_with_hooks(ids, fwd_hooks=hooks, prepend_bos=False), clean)


def test_a_long_window_that_attention_does_not_pass_on_is_refused(tmp_path):
    """Qwen2-MoE's window lives in its mask alone; a probe shorter than the window would never notice."""
    folder = families.save("qwen2_moe_window", tmp_path)
    with pytest.raises(CapabilityError, match=r"layer\(s\) \[0, 2\] slide over 100 tokens, but their attention call"):
        models.load(folder)


def test_a_window_of_all_layers_that_attention_does_not_pass_on_is_refused(tmp_path, monkeypatch):
    """Without layer_types nothing but the mask itself tells: it is tried with a window of two tokens."""
    folder = families.save("mistral", tmp_path, sliding_window=100)
    real = attention.attention_forward

    def silent(module, *args, **kwargs):
        return real(module, *args, **kwargs | {"sliding_window": None})

    with monkeypatch.context() as patch:
        patch.setattr(attention, "attention_forward", silent)
        with pytest.raises(CapabilityError, match=r"layer\(s\) \[0, 1, 2\] slide over 100 tokens, but their attention"):
            models.load(folder)
    attention.register()
    assert models.load(folder).geometry.windows == (100, 100, 100)


def test_a_class_that_makes_a_mask_of_its_own_is_refused(llama, monkeypatch):
    real = attention.attention_forward
    mask = torch.zeros(1, 1, 16, 16)
    monkeypatch.setattr(attention, "attention_forward", lambda m, q, k, v, _, **rest: real(m, q, k, v, mask, **rest))
    refused(llama, "LlamaAttention makes an attention mask of its own; allowed: classes whose masks")
    monkeypatch.undo()
    attention.register()


def test_experts_in_half_precision_are_judged_by_most_rows():
    """One token that went to other experts is no fault; half of them is."""
    a, flipped = torch.zeros(9, 4), torch.zeros(9, 4)
    flipped[3] = 5.0
    assert distance.typical(a, flipped) == 0 and distance.largest(a, flipped) == 5
    flipped[4:8] = 5.0
    assert distance.typical(a, flipped) == 5 and distance.typical(a[None], flipped[None]) == 5
    flipped[0, 0] = torch.nan
    assert math.isnan(distance.typical(a, flipped))


def test_which_models_route(tiny):
    assert distance.routes(tiny("gpt_oss").twin)
    assert not any(distance.routes(tiny(family).twin) for family in families.FAMILIES if family != "gpt_oss")


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
    real = trials.bridge_logits
    monkeypatch.setattr(trials, "bridge_logits", lambda bridge, ids: real(bridge, ids) + 0.01)
    refused(llama, r"TransformerLens' logits differ by 0\.01 \(tolerance 0\.0005\)")


def test_an_output_projection_of_another_layout_is_refused(llama, monkeypatch):
    real = engine.output_weights
    monkeypatch.setattr(engine, "output_weights", lambda module, heads: real(module, heads).flip(0))
    refused(llama, "the output projection is not a plain one: z W_O is off by")


def test_a_fast_path_that_masks_something_else_is_refused(llama, monkeypatch):
    real = trials.twin_masked
    monkeypatch.setattr(trials, "twin_masked", lambda *a: real(*a) + 0.002)
    refused(llama, r"under a mask the fast path differs from hooks by 0\.002")


def test_rows_that_differ_are_refused(llama, monkeypatch):
    real = trials.rows
    with monkeypatch.context() as patch:
        patch.setattr(trials, "rows", lambda *a: (real(*a)[0] * 0.999, real(*a)[1]))
        refused(llama, "attention rows differ from TransformerLens' by")
    monkeypatch.setattr(trials, "rows", lambda *a: (real(*a)[0], real(*a)[1] - 0.001))
    refused(llama, r"attention rows miss a sum of 1 by 0\.001")


def test_a_model_with_sinks_on_some_layers_only_is_refused(tiny_folder, monkeypatch):
    real = attention.attention_forward

    def some(module, *args, **kwargs):
        return real(module, *args, **kwargs | ({"s_aux": None} if module.layer_idx == 1 else {}))

    monkeypatch.setattr(attention, "attention_forward", some)
    with pytest.raises(CapabilityError, match="some layers have learned sinks and some do not"):
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
    ("dtype", "expected"), [(torch.float32, 5e-4), (torch.bfloat16, 16 * 2**-7 * 10), (torch.float16, 16 * 2**-10 * 10)]
)
def test_tolerance_follows_the_dtype(dtype, expected):
    assert distance.tolerance(torch.tensor([-10.0, 3.0]), dtype) == pytest.approx(expected)


def said(words, capsys):
    capsys.readouterr()  # what saving the model said
    status = cli.main(words)
    out = capsys.readouterr()
    return status, out.out, out.err


def test_a_refused_model_as_json_says_what_was_found(tmp_path, capsys):
    """OPT comes as far as the mask: each layer is named, and what came before it was measured."""
    folder = families.save("opt", tmp_path / "opt")
    status, out, err = said(["check", str(folder), "--json"], capsys)
    found = json.loads(out.splitlines()[-1])
    assert status == 1 and err.count("\n") == 1 and found["error"] in err and not found["ok"]
    kind = {"kind": "AttentionBridge", "maskable": False, "window": None, "softcap": None, "sink": False}
    assert found["layers"] == [{"index": index, **kind} for index in range(3)]
    assert found["architecture"] == "OPTForCausalLM" and found["processing"] == "raw"
    assert 0 <= found["logits_max_diff"] < 1e-4 and 0 <= found["cached_max_diff"] < 1e-4
    assert found["mask_max_diff"] is None and found["pattern_max_diff"] is None
    assert found["versions"]["transformers"].startswith("5.") and found["model"] == str(folder)
    status, out, err = said(["check", str(folder)], capsys)
    assert (
        status == 1 and "NO" in out and "AttentionBridge" in out and err.startswith("kvprobe: opt (OPTForCausalLM): ")
    )


def test_a_model_refused_before_it_ran_as_json(tmp_path, capsys):
    folder = families.save("bloom", tmp_path / "bloom")
    status, out, err = said(["check", str(folder), "--json"], capsys)
    found = json.loads(out.splitlines()[-1])
    assert status == 1 and found["architecture"] == "BloomForCausalLM" and found["layers"] == []
    assert all(found[name] is None for name in capability.DIFFERENCES) and "keep the class' own attention" in err
    status, out, err = said(["check", str(folder)], capsys)
    assert status == 1 and not out and err.count("\n") == 1


def test_a_good_and_a_refused_model_have_the_same_keys(tmp_path, tiny):
    good = tiny("llama").report.to_dict()
    bad = capability.refusal("x", CapabilityError("no"), {"torch": "2"})
    assert set(bad) - set(good) == {"error"}
    assert set(good) - set(bad) == {"attention", "shared_parameters"}


def test_a_path_that_does_not_exist_is_a_mistake(capsys):
    status, out, err = said(["check", "./nowhere", "--json"], capsys)
    assert status == 2 and not out and "'./nowhere' is not a model folder" in err


def test_a_model_that_transformers_itself_cannot_run_is_refused(llama, monkeypatch):
    from transformers import LlamaForCausalLM

    def broken(self, *args, **kwargs):
        raise RuntimeError("strides should be\nmultiple of 16 bytes")

    monkeypatch.setattr(LlamaForCausalLM, "forward", broken)
    message = refused(
        llama, r"transformers itself cannot run it \(RuntimeError: strides should be multiple of 16 bytes\)"
    )
    assert "\n" not in message and "transformers 5." in message

"""The model's own rotation, undone: every family proves itself, or is refused with the reason."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from kvprobe import engine, models
from kvprobe.errors import CapabilityError
from kvprobe.rotary import Rotary

SIZES = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "qwen3": ("Qwen3Config", {}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.3}),
    "phi3": ("Phi3Config", {"pad_token_id": 0, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "cohere": ("CohereConfig", {}),
    "glm": ("GlmConfig", {"pad_token_id": 0}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN}),
    "yarn": ("LlamaConfig", {"rope_parameters": YARN}),
}
INTERLEAVED = {"cohere", "glm"}
SCALED = {"gpt_oss", "yarn"}
ROTARY_DIMS = {"phi3": 4, "gpt_neox": 4, "glm": 4}


def build(config_name, **changes):
    """A random model's twin, as load() makes it."""
    import transformers

    config = getattr(transformers, config_name)(**{**SIZES, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return SimpleNamespace(twin=models.make_twin(model.eval()))


@pytest.fixture(scope="module")
def loaded():
    cache = {}

    def get(name):
        if name not in cache:
            config, changes = FAMILIES[name]
            cache[name] = build(config, **changes)
        return cache[name]

    return get


def layer0_inputs(model, ids):
    """Queries before rotation [1, H, n, d] and after, read off layer 0 of the plain transformers code."""
    seen = {}
    module = next(m for m in model.twin.modules() if getattr(m, "layer_idx", None) == 0 and hasattr(m, "config"))
    name = "q_norm" if hasattr(module, "q_norm") else "q_proj" if hasattr(module, "q_proj") else None
    child = getattr(module, name or ("qkv_proj" if hasattr(module, "qkv_proj") else "query_key_value"))
    hook = child.register_forward_hook(lambda _m, _i, out: seen.setdefault("q", out))
    try:
        _, run = engine.prefill(model.twin, ids, capture=torch.arange(len(ids)))
    finally:
        hook.remove()
    rotated, before = run.queries[0][0], seen["q"]
    heads, n, d = rotated.shape
    if hasattr(module, "query_key_value"):
        before = before.view(n, heads, 3 * d)[..., :d]
    else:
        before = before.reshape(n, -1)[:, : heads * d].view(n, heads, d)
    return before.transpose(0, 1), rotated


@pytest.mark.parametrize("name", FAMILIES)
def test_queries_unrotated_are_the_projection(loaded, name):
    model = loaded(name)
    ids = torch.arange(3, 43)
    before, rotated = layer0_inputs(model, ids)
    turn, at = Rotary.of(model), torch.arange(len(ids))
    assert turn.interleaved == (name in INTERLEAVED)
    assert not torch.allclose(before, rotated, atol=1e-2)  # else nothing would be tested
    assert_close(turn.unrotate(rotated, at), before, rtol=2e-5, atol=2e-5)
    assert_close(turn.rotate(before, at), rotated, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_inverse_scale_and_untouched_components(loaded, name):
    turn = Rotary.of(loaded(name))
    at = torch.tensor([0, 1, 7, 130, 999])
    x = torch.randn(3, 5, turn.head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    there = turn.rotate(x, at)
    assert_close(turn.unrotate(there, at), x, rtol=1e-6, atol=1e-6)
    turning = ROTARY_DIMS.get(name, turn.head_dim)
    assert torch.equal(there[..., turning:], x[..., turning:])
    lengths = there[..., :turning].norm(dim=-1) / x[..., :turning].norm(dim=-1)
    assert_close(lengths, torch.full_like(lengths, float(lengths[0, 0])), rtol=1e-6, atol=0)
    assert (float(lengths[0, 0]) > 1.1) == (name in SCALED)


@pytest.mark.parametrize("name", FAMILIES)
def test_mean_matrix_is_the_mean_of_rotations(loaded, name):
    turn = Rotary.of(loaded(name))
    at = torch.arange(90, 160)
    x = torch.randn(turn.head_dim, generator=torch.Generator().manual_seed(2))
    slow = turn.rotate(x.expand(len(at), -1).double(), at).mean(0).float()
    assert_close(turn.mean_matrix(at) @ x, slow, rtol=1e-5, atol=1e-5)


def test_half_precision_comes_out_in_fp32(loaded):
    turn = Rotary.of(loaded("phi3"))
    x = torch.randn(2, 3, 8).bfloat16()
    assert turn.rotate(x, torch.arange(3)).dtype == torch.float32
    assert_close(turn.rotate(x, torch.arange(3)), turn.rotate(x.float(), torch.arange(3)))


@pytest.mark.parametrize("name", ["llama", "cohere"])
def test_a_bf16_model_proves_itself(name):
    config, changes = FAMILIES[name]
    model = build(config, **changes)
    model.twin.to(torch.bfloat16)
    assert Rotary.of(model).interleaved == (name in INTERLEAVED)


def test_tiny_models_of_the_tests(tiny):
    for family in ("llama", "mistral", "gemma2", "gpt_oss"):
        assert not Rotary.of(tiny(family)).interleaved
    with pytest.raises(CapabilityError, match=r"GPT2LMHeadModel: queries cannot be un-rotated .*found: none"):
        Rotary.of(tiny("gpt2"))


REFUSED = {
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 5}, "local and global layers differently"),
    "smollm3": (
        "SmolLM3Config",
        {"no_rope_layers": [1, 0], "pad_token_id": 0},
        "does not rotate the queries of layer 1",
    ),
    "dynamic": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "dynamic scaling changes the angles with the length",
    ),
    "longrope": (
        "Phi3Config",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            },
        },
        "longrope scaling changes the angles",
    ),
    "ministral3": ("Ministral3Config", {}, "scales queries by their position"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    config, changes, reason = REFUSED[name]
    model = build(config, **changes)
    with pytest.raises(CapabilityError, match=reason) as caught:
        Rotary.of(model)
    assert "\n" not in str(caught.value) and type(model.twin).__name__ in str(caught.value)


def test_several_rotary_modules_are_refused(loaded):
    model = build(*FAMILIES["llama"][:1])
    model.twin.model.rotary_emb_local = type(model.twin.model.rotary_emb)(model.twin.config)
    with pytest.raises(CapabilityError, match=r"rotary_emb found: model\.rotary_emb, model\.rotary_emb_local"):
        Rotary.of(model)


@pytest.mark.parametrize(
    ("angle", "how"), [(0.0, "does not rotate the keys"), (2.0, r"turns the keys otherwise \(.* apart\)")]
)
def test_a_layer_behind_sinks_that_turns_otherwise_is_refused(loaded, angle, how):
    """Queries prove layer 0 alone where there are sinks; the keys of a text that moved prove all of them."""
    model = build(*FAMILIES["gpt_oss"][:1], **FAMILIES["gpt_oss"][1])
    assert Rotary.of(model)
    module = model.twin.model.layers[1].self_attn
    forward = module.forward

    def otherwise(*args, position_embeddings, **rest):
        cos, sin = (table.double() for table in position_embeddings)
        size, turn = (cos.square() + sin.square()).sqrt(), torch.atan2(sin, cos) * angle
        return forward(*args, position_embeddings=((size * turn.cos()).float(), (size * turn.sin()).float()), **rest)

    module.forward = otherwise
    with pytest.raises(CapabilityError, match=rf"GptOssForCausalLM {how} on layer 1; allowed: one rotation"):
        Rotary.of(model)


def test_an_unknown_style_is_refused(monkeypatch):
    """A model that turns the other way round: neither style undoes it."""
    from transformers.models.llama import modeling_llama

    model = build(*FAMILIES["llama"][:1])
    right = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, c, s, **rest: right(q, k, c, -s, **rest))
    with pytest.raises(CapabilityError, match=r"LlamaForCausalLM: no known style .* on layer"):
        Rotary.of(model)


def test_queries_of_zero_prove_nothing():
    model = build(*FAMILIES["llama"][:1])
    with torch.no_grad():
        model.twin.model.layers[1].self_attn.q_proj.weight.zero_()
    with pytest.raises(CapabilityError, match="layer 1"):
        Rotary.of(model)


def test_the_proof_leaves_nothing_behind(loaded):
    model = loaded("llama")
    ids = torch.arange(5, 25)
    before = engine.prefill(model.twin, ids)[0].next_logits
    Rotary.of(model)
    assert torch.equal(engine.prefill(model.twin, ids)[0].next_logits, before)

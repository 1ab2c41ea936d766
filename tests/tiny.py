"""Tiny random models of each family, saved to a folder as transformers would save them; no download."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
COMMON = {**SIZES, **HEADS, **IDS}
DERIVED = {name: value for name, value in COMMON.items() if name != "head_dim"}
"""For configs that have no head_dim: it is hidden_size / num_attention_heads."""

GPT2 = {"vocab_size": 320, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 512, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip
OLD = {"vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
       "max_position_embeddings": 512, **IDS}  # fmt: skip
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
WINDOW, HALF = {"sliding_window": 5}, {"partial_rotary_factor": 0.5}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
          "shared_expert_intermediate_size": 32}  # fmt: skip
CAPPED = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
PER_LAYER = {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}

CONFIGS = {
    "gpt2": ("GPT2Config", GPT2),
    "gpt_bigcode": ("GPTBigCodeConfig", GPT2),
    "gpt_neox": ("GPTNeoXConfig", OLD | {"intermediate_size": 64, "rotary_pct": 0.5}),
    "llama": ("LlamaConfig", COMMON),
    "mistral": ("MistralConfig", COMMON | WINDOW),
    "ministral3": ("Ministral3Config", COMMON),
    "mixtral": ("MixtralConfig", COMMON | EXPERTS),
    "qwen2": ("Qwen2Config", DERIVED),
    "qwen2_moe": ("Qwen2MoeConfig", DERIVED | SPARSE),
    "qwen3": ("Qwen3Config", COMMON),
    "gemma": ("GemmaConfig", COMMON),
    "gemma2": ("Gemma2Config", COMMON | WINDOW | CAPPED),
    "gemma3_text": ("Gemma3TextConfig", COMMON | WINDOW | ALTERNATING | {"query_pre_attn_scalar": 8}),
    "phi": ("PhiConfig", DERIVED | HALF),
    "phi3": ("Phi3Config", DERIVED | HALF),
    "gpt_oss": ("GptOssConfig", COMMON | ALTERNATING | EXPERTS | {"sliding_window": 6}),
    "olmo2": ("Olmo2Config", DERIVED),
    "olmo3": ("Olmo3Config", DERIVED | WINDOW | ALTERNATING),
    "granite": ("GraniteConfig", DERIVED | {"attention_multiplier": 0.3}),
    "stablelm": ("StableLmConfig", DERIVED | HALF),
    "starcoder2": ("Starcoder2Config", DERIVED | WINDOW),
    "cohere": ("CohereConfig", DERIVED | {"logit_scale": 1.0}),
    "cohere2": ("Cohere2Config", COMMON | WINDOW | ALTERNATING | {"logit_scale": 1.0}),
    "smollm3": ("SmolLM3Config", DERIVED | {"no_rope_layers": [1, 0, 1]}),
}
"""Family → config class and arguments: 6 query heads on 2 kv heads, or the one layout that the class knows."""

REFUSED = {
    "opt": ("OPTConfig", OLD | {"word_embed_proj_dim": 48, "ffn_dim": 64}),
    "falcon": ("FalconConfig", OLD | {"multi_query": True, "new_decoder_architecture": False}),
    "falcon_new": ("FalconConfig", OLD | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_alibi": ("FalconConfig", OLD | {"new_decoder_architecture": False, "alibi": True}),
    "bloom": ("BloomConfig", {"vocab_size": 320, "hidden_size": 48, "n_layer": 3, "n_head": 6, **IDS}),
    "mpt": ("MptConfig", {"vocab_size": 320, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 512}),
    "gptj": ("GPTJConfig", GPT2 | {"rotary_dim": 4}),
    "gpt_neo": ("GPTNeoConfig", {"vocab_size": 320, "hidden_size": 48, "num_layers": 2, "num_heads": 6, **IDS,
                                 "window_size": 5, "attention_types": [[["global", "local"], 1]]}),
    "ministral": ("MinistralConfig", COMMON | WINDOW),
    "phimoe": ("PhimoeConfig", COMMON | EXPERTS),
    "qwen2_moe_window": ("Qwen2MoeConfig", DERIVED | SPARSE | {"use_sliding_window": True, "sliding_window": 100}),
    "gemma3n_text": ("Gemma3nTextConfig", COMMON | WINDOW | ALTERNATING | PER_LAYER
                     | {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 3}),
    "gemma4_text": ("Gemma4TextConfig", COMMON | WINDOW | ALTERNATING | PER_LAYER | {"global_head_dim": 8}),
    "llama4_text": ("Llama4TextConfig", COMMON | EXPERTS | {"intermediate_size_mlp": 64}),
    "jamba": ("JambaConfig", DERIVED | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
                                        "use_mamba_kernels": False, "mamba_d_state": 4}),
    "deepseek_v3": ("DeepseekV3Config", DERIVED | {"num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16,
                                                   "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
                                                   "first_k_dense_replace": 3}),
}  # fmt: skip
"""What load() must refuse, each for a reason of its own."""

FAMILIES = ("gpt2", "llama", "mistral", "gemma2", "gpt_oss")
"""The few that every test of an intervention runs over."""

SHAPES = {
    ("gpt2", "d = 7"): {"n_embd": 42},
    ("gpt_neox", "d = 9"): {"hidden_size": 54},
    ("stablelm", "d = 9"): {"hidden_size": 54},
    ("llama", "H d > D"): {"head_dim": 12},
    ("gemma2", "H d < D"): {"head_dim": 4},
    ("qwen3", "H d > D"): {"head_dim": 16},
    ("mistral", "no head_dim"): {"head_dim": None},
}
"""(family, name) → changes: head sizes that are odd, given apart from hidden_size, or not given."""

ONE_LAYOUT = {"gpt2": 6, "gpt_neox": 6, "gpt_bigcode": 1}
"""Families whose class knows one number of kv heads for 6 query heads."""


def layouts(family: str) -> dict[str, dict[str, int]]:
    """Name of a head layout → changes to the family's config; its default comes first."""
    only = ONE_LAYOUT.get(family)
    counts = {"GQA": 2, "MHA": 6, "MQA": 1}
    return {
        name: {} if only or kv == 2 else {"num_key_value_heads": kv}
        for name, kv in counts.items()
        if only in (None, kv)
    }


def config(family: str, **changes):
    """The config of one family, with changes to its arguments."""
    import transformers

    name, arguments = (CONFIGS | REFUSED)[family]
    # Some classes write into the lists that they are given (gemma4 makes the last layer a full one).
    return getattr(transformers, name)(**copy.deepcopy(arguments | changes))


def save(family: str, folder: Path, seed: int = 0, **changes) -> Path:
    """Build one family's model with weights large enough that attention is far from uniform, and save it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
            elif "sinks" in name:
                parameter.normal_(0, 1)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer():
    """A byte-level tokenizer of 320 ids: 0 pad, 1 bos, 2 eos, then all 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {char: index + 3 for index, char in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")

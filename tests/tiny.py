"""Tiny random models of each family, saved to a folder as transformers would save them; no download."""

from __future__ import annotations

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


def _configs():
    import transformers as t

    common = {**SIZES, **HEADS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return {
        "gpt2": lambda: t.GPT2Config(
            vocab_size=320, n_embd=48, n_layer=3, n_head=6, n_positions=512, bos_token_id=1, eos_token_id=2
        ),
        "llama": lambda: t.LlamaConfig(**common),
        "mistral": lambda: t.MistralConfig(**common, sliding_window=5),
        "gemma2": lambda: t.Gemma2Config(
            **common, sliding_window=5, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=5.0
        ),
        "gpt_oss": lambda: t.GptOssConfig(
            **common,
            sliding_window=6,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    }


FAMILIES = ("gpt2", "llama", "mistral", "gemma2", "gpt_oss")


def save(family: str, folder: Path, seed: int = 0, **changes: int) -> Path:
    """Build one family's model with weights large enough that attention is far from uniform, and save it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = _configs()[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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

"""GGUF → safetensors, run in a process of its own: ``python -m kvprobe.conversion FILE.gguf FOLDER``.

transformers can load a GGUF file, but takes 25 s each time and refuses to save the model that it made. Here its
dequantised tensors are written once as plain fp32 safetensors, with a configuration that no longer speaks of
quantisation. A separate process keeps the 1.2 GB that this takes for a 135M model out of the caller.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` to `folder` as transformers saves one: configuration, tokenizer and fp32 weights.

    Parameters
    ----------
    gguf
        A GGUF file of a Llama with a byte-level BPE tokenizer (its only buffers are rotary tables, which are computed:
        the weights are parameters alone).
    folder
        An existing folder; the files written into it are the same bytes whenever the library versions are the same.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # named_parameters() yields a tied tensor once, under its first name; loading ties it again.
    save_file(dict(model.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})
    _plain_config(model, folder.name).save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    _plain_tokenizer(tokenizer, model.config).save_pretrained(folder)


def _plain_config(model: Any, name: str) -> Any:
    """Return the configuration of an ordinary fp32 model, under a name that no hub has."""
    config = model.config
    config.architectures = [type(model).__name__]
    config._name_or_path = name
    for leftover in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, leftover):
            delattr(config, leftover)
    return config


def _plain_tokenizer(tokenizer: Any, config: Any) -> Any:
    """Return the byte-level BPE that the file means: versions of transformers read its ends and offsets differently.

    5.9 takes the first special token for the last one too, counts a word's leading space into its offsets, and drops
    spaces before punctuation when it decodes.
    """
    from tokenizers import decoders, pre_tokenizers

    for kind in ("bos", "eos", "pad", "unk"):
        token = tokenizer.convert_ids_to_tokens(getattr(config, f"{kind}_token_id"))
        setattr(tokenizer, f"{kind}_token", token)
    tokenizer.clean_up_tokenization_spaces = False
    backend = tokenizer.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    backend.decoder = decoders.ByteLevel()
    return tokenizer


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

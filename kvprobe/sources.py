"""Where a model comes from: the embedded one, a folder, or the hub, read by transformers; every failure in one line."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from kvprobe import embedded
from kvprobe.errors import CapabilityError, ModelError, quote

PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
EMBEDDED = ("smollm2-135m", "smollm2-135m-instruct")


def describe(name: str | os.PathLike[str]) -> tuple[Any, str]:
    """A model's config and short name, its weights not read: ``name`` as for :func:`load`."""
    from transformers import AutoConfig

    source, label = resolve(name)
    if not os.path.isdir(source):
        _require_hub(source, {})
    try:
        config = AutoConfig.from_pretrained(source)
    except Exception as error:  # as in load
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"cannot read the config of {label!r}: {reason} (allowed: 'smollm2-135m', a folder, or a hub name)"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise CapabilityError(f"{label} is an encoder-decoder; allowed: decoder-only language models")
    return config, label


def resolve(name: str | os.PathLike[str]) -> tuple[str, str]:
    """(what transformers is given, short name) of a name, a folder or the embedded model."""
    if not isinstance(name, (str, os.PathLike)):
        raise ModelError(f"{quote(name)} is not a model: give 'smollm2-135m', a folder with config.json, or a hub name")
    text = os.fspath(name)
    if not text.strip():
        raise ModelError("the model's name is empty: give 'smollm2-135m', a folder with config.json, or a hub name")
    if text.lower() in EMBEDDED:
        return str(embedded.ensure()), EMBEDDED[0]
    if os.path.isdir(text):
        return text, Path(text).resolve().name
    if os.path.isfile(text) or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelError(
            f"{quote(text, 300)} is not a model folder: give 'smollm2-135m', a folder with config.json, or a hub name"
        )
    return text, text


def from_transformers(
    source: str, label: str, dtype: torch.dtype | str | None, trust: bool, options: dict[str, Any]
) -> tuple[Any, Any]:
    """Model and tokenizer as transformers reads them, with eager attention; a checkpoint with gaps is refused."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if not os.path.isdir(source):
        _require_hub(source, options)
    keep = {
        key: options[key]
        for key in ("revision", "token", "local_files_only", "cache_dir", "subfolder")
        if key in options
    }
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust, **keep)
            if getattr(config, "is_encoder_decoder", False):
                raise CapabilityError(f"{label} is an encoder-decoder; allowed: decoder-only language models")
            model, found = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype or "auto",
                attn_implementation="eager",
                trust_remote_code=trust,
                output_loading_info=True,
                **options,
            )
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust, **keep)
    except ModelError:
        raise
    except Exception as error:  # transformers, safetensors and torch raise many kinds here; the user needs one line
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"cannot load {label!r}: {reason} (allowed: 'smollm2-135m', a folder saved by transformers, or a hub name)"
        ) from error
    if missing := sorted(found["missing_keys"]):  # transformers would leave them random, with a warning
        raise ModelError(
            f"{label}: {len(missing)} weights of {type(model).__name__} are not in its files ({quote(missing)}); "
            "allowed: a whole checkpoint"
        )
    return model, tokenizer


def _require_hub(source: str, options: dict[str, Any]) -> None:
    """Fail at once where a hub name is neither cached nor reachable: transformers would retry for half a minute."""
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(source, "config.json", options.get("cache_dir"), options.get("revision"))
    except ValueError:  # of its validator of names
        raise ModelError(
            f"{quote(source)} is neither a folder nor a hub name: give 'smollm2-135m', a folder with config.json, or a "
            "hub name"
        ) from None
    if isinstance(cached, str) or constants.HF_HUB_OFFLINE or any(name in os.environ for name in PROXIES):
        return
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise ModelError(
            f"cannot load {source!r}: no such folder, not in the local hub cache, and {host} cannot be reached; "
            "allowed: 'smollm2-135m', a folder saved by transformers, or a hub name"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its progress bars, restored afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def max_length(config: Any) -> int | None:
    """Positions that a config allows, where it says so."""
    text = config.get_text_config()
    value = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return int(value) if value else None

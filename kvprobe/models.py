"""load(): a TransformerLens bridge, its tokenizer, and a fast twin on the same weights, checked before it is yours.

The only module that imports transformer_lens.
"""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from kvprobe import attention, checks, embedded, engine
from kvprobe.capability import Report
from kvprobe.errors import CapabilityError, ModelError, quote
from kvprobe.inputs import count
from kvprobe.interventions.plan import Scene
from kvprobe.rotary import Rotary

LEARNED = ("wpe", "embed_positions", "position_embeddings")
"""Modules that add a position to the embedding, before any key is made."""

PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
EMBEDDED = ("smollm2-135m", "smollm2-135m-instruct")


@dataclass(frozen=True)
class Geometry:
    """Sizes and kinds, per model and per layer."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_model: int
    vocab: int
    windows: tuple[int | None, ...]
    softcaps: tuple[float | None, ...]
    has_sink: bool
    scales: tuple[float, ...] = ()
    rotary: bool = True

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.n_heads // self.n_kv_heads


@dataclass(frozen=True)
class Model:
    """A language model ready to be probed.

    Attributes
    ----------
    bridge
        TransformerLens' TransformerBridge (eager attention, every hook).
    twin
        The same transformers class on the same parameter tensors, with kvprobe's attention: the fast path.
    report
        The capability check that ran at load (:class:`kvprobe.capability.Report`).
    """

    name: str
    bridge: Any
    twin: Any
    tokenizer: Any
    geometry: Geometry
    report: Report
    max_length: int | None

    @property
    def device(self) -> torch.device:
        """Where the embedding lives."""
        return next(iter(self.twin.parameters())).device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return next(iter(self.twin.parameters())).dtype

    def w_o(self, layer: int) -> Tensor:
        """W_O of one layer as a view, [H, d, D]."""
        return engine.output_weights(self._attention[layer], self.geometry.n_heads)

    @cached_property
    def _attention(self) -> Sequence[Any]:
        """The modules that own the output projections: finding them walks the whole model."""
        return engine.attention_modules(self.twin, self.geometry.n_layers)

    def scene(self, prompt: Any, suffix: int | None = None) -> Scene:
        """What a plan must know of this model and a prompt."""
        n = len(prompt) - prompt.pad
        suffix = 0 if suffix is None else count("suffix", suffix, 1, n)
        geometry = self.geometry
        spans = tuple(prompt.spans.items())
        return Scene(
            n,
            suffix,
            geometry.n_layers,
            geometry.n_heads,
            geometry.windows,
            geometry.has_sink,
            prompt.pad,
            spans,
            n_kv_heads=geometry.n_kv_heads,
            d_model=geometry.d_model,
            head_dim=geometry.head_dim,
            move=self.moved_keys,
        )

    def moved_keys(self, keys: Tensor, there: Tensor, here: Tensor) -> Tensor:
        """Cached keys [K, C, d] of positions ``there`` as they would stand at ``here``: R(here) R(there)⁻¹ k, fp32.

        On a model with learned positions keys do not rotate: they are the same anywhere.
        """
        if not self.geometry.rotary:
            if not any(path.split(".")[-1] in LEARNED for path, _ in self.twin.named_modules()):
                raise CapabilityError(
                    f"{self.name} has neither rotary_emb nor learned positions ({', '.join(LEARNED)}): how its keys "
                    "depend on their position is not known; allowed: keys that stay where they were"
                )
            return keys
        there, here = there.to(keys.device), here.to(keys.device)
        return self._rotary.rotate(self._rotary.unrotate(keys, there), here)

    @cached_property
    def _rotary(self) -> Rotary:
        return Rotary.of(self)

    def decode(self, ids: Any) -> str:
        """Text of token ids, special tokens kept."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @property
    def revision(self) -> str | None:
        """Which weights: a hub model's commit, the embedded model's sha256; None for a folder that does not tell."""
        return embedded.revision(self.twin.config)

    @property
    def meta(self) -> dict[str, Any]:
        """What every saved result carries about its model."""
        return {
            "model": self.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "processing": self.report.processing,
            "versions": dict(self.report.versions),
        }


def load(
    name: str | os.PathLike[str] = "smollm2-135m",
    *,
    dtype: torch.dtype | str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Model:
    """Load a model and prove that it can be intervened on.

    Parameters
    ----------
    name
        ``"smollm2-135m"`` (fetched and converted once), a local folder, or a hub name that transformers understands.
    dtype, device, options
        Passed to transformers (``revision``, ``device_map``, …). The embedded model is fp32.
    trust_remote_code
        Off unless asked for.

    Raises
    ------
    ModelError
        The model cannot be found, or a capability check fails: the message names layer, class, versions and a way out.
    """
    source, label = _resolve(name)
    hf, tokenizer = _from_transformers(source, label, dtype, trust_remote_code, options)
    if device is not None:
        hf = _moved(hf, device)
    hf.eval()
    _refuse_unsupported(hf, label)
    probe = checks.probe_ids(hf)
    reference = checks.reference_logits(hf, probe)
    twin = make_twin(hf)
    bridge = _boot(source, hf, tokenizer, label)
    geometry, report = checks.run(label, hf, twin, bridge, probe, reference)
    return Model(label, bridge, twin, tokenizer, Geometry(**geometry), report, _max_length(hf.config))


def make_twin(hf: Any) -> Any:
    """The same class on the same parameter and buffer tensors, with kvprobe's attention; no weight is copied.

    Equal to ``copy.deepcopy(hf)`` except that every parameter and buffer is the original object.
    """
    attention.register()
    shared = {id(tensor): tensor for tensor in (*hf.parameters(), *hf.buffers())}
    twin = copy.deepcopy(hf, dict(shared))
    twin.set_attn_implementation(attention.NAME)
    if twin.config._attn_implementation != attention.NAME:
        raise ModelError(
            f"{type(hf).__name__} keeps its own attention (set_attn_implementation had no effect): kvprobe cannot see "
            "its logits. Way out: a class that uses transformers' AttentionInterface"
        )
    return twin


def _moved(hf: Any, device: str) -> Any:
    try:
        return hf.to(device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled for the device
        raise ModelError(f"device={device!r} is not available: {' '.join(str(error).split())[:200]}") from error


def _resolve(name: str | os.PathLike[str]) -> tuple[str, str]:
    if not isinstance(name, (str, os.PathLike)):
        raise ModelError(f"{quote(name)} is not a model: give 'smollm2-135m', a folder with config.json, or a hub name")
    text = os.fspath(name)
    if not text.strip():
        raise ModelError("the model's name is empty: give 'smollm2-135m', a folder with config.json, or a hub name")
    if text.lower() in EMBEDDED:
        return str(embedded.ensure()), EMBEDDED[0]
    if Path(text).is_dir():
        return text, Path(text).resolve().name
    if Path(text).is_file() or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelError(
            f"{text!r} is not a model folder: give 'smollm2-135m', a folder with config.json, or a hub name"
        )
    return text, text


def _from_transformers(
    source: str, label: str, dtype: torch.dtype | str | None, trust: bool, options: dict[str, Any]
) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if not Path(source).is_dir():
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
                raise ModelError(f"{label} is an encoder-decoder; allowed: decoder-only language models")
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

    cached = try_to_load_from_cache(source, "config.json", options.get("cache_dir"), options.get("revision"))
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


def _refuse_unsupported(hf: Any, label: str) -> None:
    """Attention patterns that positions and a window do not describe, and weights that cannot be shared."""
    config = hf.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or getattr(config, "attention_chunk_size", None):
        raise ModelError(
            f"{label}: attention of kind {sorted(kinds) or ['chunked']} is not supported; allowed: full and sliding"
        )
    if any(parameter.device.type == "meta" for parameter in hf.parameters()):
        raise ModelError(f"{label} is partly offloaded to disk: the twin cannot share its weights; load it whole")


def _boot(source: str, hf: Any, tokenizer: Any, label: str) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    try:
        return TransformerBridge.boot_transformers(source, hf_model=hf, tokenizer=tokenizer)
    except Exception as error:  # TransformerLens raises many kinds here; the user needs one line
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"TransformerLens has no working bridge for {label} ({type(hf).__name__}): {reason}"
        ) from error


def _max_length(config: Any) -> int | None:
    text = config.get_text_config()
    value = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return int(value) if value else None

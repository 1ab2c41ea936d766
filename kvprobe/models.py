"""load(): a TransformerLens bridge, its tokenizer, and a fast twin on the same weights, checked before it is yours.

The only module that imports transformer_lens.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from kvprobe import attention, checks, embedded, engine, sources
from kvprobe.capability import Report
from kvprobe.costs import Costs, hollow
from kvprobe.errors import CapabilityError, ModelError
from kvprobe.inputs import count
from kvprobe.interventions.plan import Scene
from kvprobe.rotary import Rotary
from kvprobe.versions import versions

LEARNED = ("wpe", "embed_positions", "position_embeddings")
"""Modules that add a position to the embedding, before any key is made."""


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
    def costs(self) -> Costs:
        """What passes of this model cost (:mod:`kvprobe.costs`)."""
        return Costs(hollow(self.twin), self.device)

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
        The model cannot be found or read.
    CapabilityError
        It can be read, but not be intervened on: the message names layer, class, versions and a way out.
    """
    source, label = sources.resolve(name)
    hf, tokenizer = sources.from_transformers(source, label, dtype, trust_remote_code, options)
    if device is not None:
        hf = _moved(hf, device)
    hf.eval()
    _refuse_unsupported(hf, label)
    probe = checks.probe_ids(hf)
    reference = checks.reference_logits(hf, probe, label)
    twin = make_twin(hf)
    bridge = _boot(source, hf, tokenizer, label)
    _round_rotated(bridge, twin.dtype)
    geometry, report = checks.run(label, twin, bridge, probe, reference)
    return Model(label, bridge, twin, tokenizer, Geometry(**geometry), report, sources.max_length(hf.config))


def make_twin(hf: Any) -> Any:
    """The same class on the same parameter and buffer tensors, with kvprobe's attention; no weight is copied.

    Equal to ``copy.deepcopy(hf)`` except that every parameter and buffer is the original object.
    """
    attention.register()
    shared = {id(tensor): tensor for tensor in (*hf.parameters(), *hf.buffers())}
    twin = copy.deepcopy(hf, dict(shared))
    twin.set_attn_implementation(attention.NAME)
    if twin.config._attn_implementation != attention.NAME:
        layers = twin.config.get_text_config().num_hidden_layers
        raise _refusal(
            hf,
            f"all {layers} layers keep the class' own attention (set_attn_implementation had no effect): kvprobe "
            "cannot see its logits; way out: a class that uses transformers' AttentionInterface",
        )
    return twin


def _moved(hf: Any, device: str) -> Any:
    try:
        return hf.to(device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled for the device
        raise ModelError(f"device={device!r} is not available: {' '.join(str(error).split())[:200]}") from error


def _refuse_unsupported(hf: Any, label: str) -> None:
    """Attention patterns that positions and a window do not describe, and weights that cannot be shared."""
    refuse_attention(hf, label)
    if any(parameter.device.type == "meta" for parameter in hf.parameters()):
        raise ModelError(f"{label} is partly offloaded to disk: the twin cannot share its weights; load it whole")
    rounding = [name for name, parameter in hf.named_parameters() if type(parameter).__name__ == "Int8Params"]
    if rounding:
        raise CapabilityError(
            f"{label} ({type(hf).__name__}): {rounding[0]} and {len(rounding) - 1} more are 8-bit weights of "
            "bitsandbytes, whose products round activations too, and no two ways to the same numbers agree; allowed: "
            "4 bits, 8-bit weights alone (torchao's Int8WeightOnlyConfig), or 16 bits and more"
        )


def refuse_attention(hf: Any, label: str) -> None:
    """Refuse attention patterns that positions and a window do not describe, as the config tells them."""
    config = hf.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    strange = [layer for layer, kind in enumerate(kinds) if kind not in ("full_attention", "sliding_attention")]
    if strange or getattr(config, "attention_chunk_size", None):
        names = sorted({kinds[layer] for layer in strange}) or ["chunked"]
        where = f" (layers {strange})" if strange else ""
        raise _refusal(
            hf,
            f"attention of kind {names}{where} is not supported; allowed: full and sliding, which positions and a "
            "window describe",
            label,
        )


def _boot(source: str, hf: Any, tokenizer: Any, label: str) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    try:
        return TransformerBridge.boot_transformers(source, hf_model=hf, tokenizer=tokenizer)
    except Exception as error:  # TransformerLens raises many kinds here; the user needs one line
        # It lists a hundred architectures that it does know.
        reason = " ".join(f"{type(error).__name__}: {error}".split()).split(" Available architectures")[0][:300]
        what = f"TransformerLens has no working bridge for any of its layers ({reason.rstrip('.')})"
        raise _refusal(hf, f"{what}; way out: an architecture that TransformerLens lists", label) from error


def _refusal(hf: Any, what: str, label: str | None = None) -> CapabilityError:
    """The error that says so, naming the model, its class and what is installed."""
    name = type(hf).__name__
    who = name if label is None else f"{label} ({name})"
    found = versions("transformers", "transformer-lens", "torch")
    have = ", ".join(f"{package} {version}" for package, version in found.items() if package != "python")
    return CapabilityError(f"{who}: {what} [{have}]", {"architecture": name})


def _round_rotated(bridge: Any, dtype: torch.dtype) -> None:
    """Rotated queries and keys of the bridge in the model's dtype, as transformers has them.

    Where a rotary embedding gives cos and sin in fp32 (OLMo), TransformerLens goes on in fp32: keys then fit no cache
    of the model's dtype, and the pattern does not fit its values. The hooks are this bridge's own and stay on it.
    """
    if dtype in (torch.float32, torch.float64):
        return
    for block in bridge.blocks:
        for name in ("hook_rot_q", "hook_rot_k"):
            point = getattr(getattr(block, "attn", None), name, None)
            if point is not None:
                point.add_perma_hook(partial(_rounded, dtype))


def _rounded(dtype: torch.dtype, tensor: Tensor, hook: Any) -> Tensor:
    return tensor.to(dtype)

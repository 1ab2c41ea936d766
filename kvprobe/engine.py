"""One forward pass of the twin under a :class:`~kvprobe.attention.Run`, and the prefix that runs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprobe.attention import Observer, Run, active
from kvprobe.errors import ModelError


@dataclass(frozen=True)
class Prefix:
    """A prefilled context: per-layer (keys, values), each [K, p, d] and rotated, plus what produced them.

    ``upto(q)`` is a view: many runs share one prefix without copying it.
    """

    ids: Tensor
    layers: list[tuple[Tensor, Tensor]]
    next_logits: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def upto(self, length: int) -> Prefix:
        """The first ``length`` positions, sharing storage."""
        if not 0 < length <= len(self):
            raise ModelError(f"a prefix of {len(self)} tokens has no first {length} tokens")
        if length == len(self):
            return self
        cut = [(keys[:, :length], values[:, :length]) for keys, values in self.layers]
        return Prefix(self.ids[:length], cut)

    @property
    def n_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(part.numel() * part.element_size() for pair in self.layers for part in pair)


def new_cache() -> Any:
    """An empty growing cache: full length in every layer, windowed or not, so that positions stay absolute."""
    from transformers import DynamicCache

    return DynamicCache()


def forward(twin: Any, ids: Tensor, run: Run, cache: Any, keep: int | Tensor = 0) -> Tensor:
    """Logits [B, rows, vocab] of new tokens ids [B, t] that follow the run's prefix and what ``cache`` already holds.

    ``keep`` is transformers' ``logits_to_keep``: 0 for all rows, k for the last k, or row indices. The cache ends up
    holding each arm's own keys only; the shared prefix is read from the run.
    """
    device = next(iter(twin.parameters())).device
    positions = torch.arange(run.start, run.start + ids.shape[1], device=device)[None]
    with torch.no_grad(), active(run):
        out = twin(
            input_ids=ids.to(device),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
    return out.logits


def cached_layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """(keys, values) per layer, [B, K, m, d], of a cache that :func:`forward` filled."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def prefill(
    twin: Any, ids: Tensor, capture: Tensor | None = None, observer: Observer | None = None
) -> tuple[Prefix, Run]:
    """Run ids [n] once by the twin's fastest exact attention; optionally keep the query rows at ``capture``."""
    run = Run(capture=capture, observer=observer)
    cache = new_cache()
    logits = forward(twin, ids[None], run, cache, keep=1)
    layers = [(keys[0], values[0]) for keys, values in cached_layers(cache)]
    return Prefix(ids, layers, logits[0, -1]), run


def extend(twin: Any, prefix: Prefix, ids: Tensor) -> Prefix:
    """A prefix with more ids behind it (a copy): only the new tokens are run."""
    run, cache = Run(prefix=prefix.layers, start=len(prefix)), new_cache()
    logits = forward(twin, ids[None], run, cache, keep=1)
    layers = [
        (torch.cat([keys, more[0]], 1), torch.cat([values, further[0]], 1))
        for (keys, values), (more, further) in zip(prefix.layers, cached_layers(cache), strict=True)
    ]
    return Prefix(torch.cat([prefix.ids.to(ids.device), ids]), layers, logits[0, -1])


def output_weights(module: Any, n_heads: int) -> Tensor:
    """W_O of an attention module as views per query head, [H, d_v, D].

    Linear stores [D, H·d_v], GPT-2's Conv1D [H·d_v, D]. Which child it is gets verified numerically at load.
    """
    for name in ("o_proj", "c_proj", "out_proj", "dense", "wo"):
        child = getattr(module, name, None)
        if child is None:
            continue
        weight = getattr(child, "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            raise ModelError(
                f"{type(module).__name__}.{name}.weight is stored as {getattr(weight, 'dtype', None)}: "
                "kvprobe reads W_O in floating point only (load the model unquantised)"
            )
        matrix = weight if type(child).__name__ == "Conv1D" else weight.T
        return matrix.detach().view(n_heads, -1, matrix.shape[1]) if matrix.is_contiguous() else _split(weight, n_heads)
    raise ModelError(
        f"{type(module).__name__} has no output projection that kvprobe knows (o_proj, c_proj, out_proj, dense, wo)"
    )


def _split(weight: Tensor, n_heads: int) -> Tensor:
    """[D, H·d] → [H, d, D] as a view."""
    return weight.detach().unflatten(1, (n_heads, -1)).permute(1, 2, 0)


def attention_modules(twin: Any, n_layers: int) -> Sequence[Any]:
    """The modules that own the output projections, by layer index."""
    found: dict[int, Any] = {}
    for module in twin.modules():
        index = getattr(module, "layer_idx", None)
        if index is not None and any(hasattr(module, name) for name in ("o_proj", "c_proj", "out_proj", "dense", "wo")):
            found.setdefault(int(index), module)
    if sorted(found) != list(range(n_layers)):
        raise ModelError(
            f"{type(twin).__name__}: attention modules found for layers {sorted(found)}, expected 0 … {n_layers - 1}"
        )
    return [found[index] for index in range(n_layers)]


def mlp_module(layer: Any) -> Any:
    """The module of a decoder layer whose output is its feed-forward update."""
    for name in ("mlp", "feed_forward", "block_sparse_moe", "ffn"):
        child = getattr(layer, name, None)
        if child is not None:
            return child
    raise ModelError(
        f"{type(layer).__name__} has no feed-forward module that kvprobe knows (mlp, feed_forward, block_sparse_moe, "
        "ffn)"
    )


def output_bias(module: Any) -> Tensor | None:
    """The bias of the output projection, or None."""
    for name in ("o_proj", "c_proj", "out_proj", "dense", "wo"):
        if hasattr(module, name):
            return getattr(getattr(module, name), "bias", None)
    return None


def end_of_sequence(model: Any) -> frozenset[int]:
    """Token ids that end a text, by the generation settings or else the tokenizer."""
    config = getattr(model.twin, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    ids = ids if ids is not None else model.tokenizer.eos_token_id
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)

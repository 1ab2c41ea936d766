"""What a capability check runs: the twin and TransformerLens, whole, in pieces, and under a mask."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvprobe import engine
from kvprobe.attention import Run
from kvprobe.interventions.hooks import score_hook
from kvprobe.interventions.mask import KVMask
from kvprobe.interventions.plan import Scene, compile_arms
from kvprobe.twopart import LayerSpec, layer_logits, visible

MASKED_KEY = 2


def bridge_logits(bridge: Any, ids: Tensor) -> Tensor:
    """TransformerLens' logits [n, vocab] of one uncached run."""
    with torch.no_grad():
        return bridge(ids, prepend_bos=False)[0].float()


def cached_twin(twin: Any, ids: Tensor, cut: int) -> Tensor:
    """The twin's logits of ids from ``cut`` on, after a prefilled context."""
    prefix, _ = engine.prefill(twin, ids[0, :cut])
    return engine.forward(twin, ids[:, cut:], Run(prefix=prefix.layers, start=cut), engine.new_cache())[0]


def cached_bridge(bridge: Any, ids: Tensor, cut: int) -> Tensor:
    """The same through TransformerLens and its own cache."""
    with torch.no_grad():
        _, cache = bridge(ids[:, :cut], return_type="logits_and_cache", use_cache=True, prepend_bos=False)
        return bridge(ids[:, cut:], past_key_values=cache, prepend_bos=False)[0]


def given_bridge(bridge: Any, twin: Any, ids: Tensor, cut: int) -> Tensor:
    """The same through TransformerLens upon the twin's cache."""
    with torch.no_grad():
        cache = engine.new_cache()
        twin(input_ids=ids[:, :cut], past_key_values=cache, use_cache=True)
        return bridge(ids[:, cut:], past_key_values=cache, prepend_bos=False)[0]


def mask_slides(twin: Any, ids: Tensor) -> bool:
    """Whether the model's own mask follows config.sliding_window: logits change when it is set to 2 tokens."""
    config = twin.config.get_text_config()
    window = config.sliding_window
    try:
        with torch.no_grad():
            wide = twin(input_ids=ids, use_cache=False).logits
            config.sliding_window = 2
            return not torch.equal(wide, twin(input_ids=ids, use_cache=False).logits)
    finally:
        config.sliding_window = window


def twin_masked(twin: Any, ids: Tensor, geometry: Mapping[str, Any]) -> Tensor:
    """The fast path's logits behind the masked key."""
    plan = compile_arms([[_mask()]], _scene(ids, geometry))
    start = plan.first[0]
    assert start is not None
    prefix, _ = engine.prefill(twin, ids[0, :start])
    run = Run(prefix=prefix.layers, start=start, biases=plan.select([0]))
    return engine.forward(twin, ids[:, start:], run, engine.new_cache())[0]


def bridge_masked(bridge: Any, ids: Tensor, geometry: Mapping[str, Any]) -> tuple[Tensor, list[int]]:
    """Mask one key on all layers through TransformerLens; returns logits after the key, and layers that ignored it."""
    scene = _scene(ids, geometry)
    plan = compile_arms([[_mask()]], scene)
    patterns: dict[int, Tensor] = {}
    hooks: list[Any] = []
    for layer, by_arm in plan.layers.items():
        hooks.append((f"blocks.{layer}.attn.hook_attn_scores", score_hook(by_arm[0], scene)))
        hooks.append((f"blocks.{layer}.attn.hook_pattern", partial(keep_pattern, patterns, layer)))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # TransformerLens warns of an edit that it drops; we say it
        logits = bridge.run_with_hooks(ids, fwd_hooks=hooks, prepend_bos=False)
    at = torch.arange(ids.shape[1], device=ids.device)
    ignored = []
    for layer in range(geometry["n_layers"]):
        sees = visible(at, at, geometry["windows"][layer])[:, MASKED_KEY] & (at > MASKED_KEY)
        pattern = patterns.get(layer)
        if pattern is None or bool((pattern[0][:, sees, MASKED_KEY] != 0).any()) or not _whole(pattern, geometry):
            ignored.append(layer)
    return logits[0, MASKED_KEY + 1 :], ignored


def patterns_of(bridge: Any, ids: Tensor, n_layers: int) -> dict[int, Tensor]:
    """TransformerLens' attention [1, H, n, n] by layer."""
    patterns: dict[int, Tensor] = {}
    hooks = [(f"blocks.{i}.attn.hook_pattern", partial(keep_pattern, patterns, i)) for i in range(n_layers)]
    with torch.no_grad():
        bridge.run_with_hooks(ids, fwd_hooks=hooks, prepend_bos=False)
    return patterns


def rows(query: Tensor, keys: Tensor, spec: LayerSpec) -> tuple[Tensor, Tensor]:
    """Attention rows and their sums with the learned sink's share added back."""
    logits = layer_logits(query, keys, spec, torch.arange(query.shape[1], device=query.device))
    if spec.sink is None:
        found = logits.softmax(-1)
        return found, found.sum(-1)
    extra = spec.sink.float().view(-1, 1, 1).expand(*logits.shape[:-1], 1)
    whole = torch.cat([logits, extra], -1).softmax(-1)
    return whole[..., :-1], whole.sum(-1)


def keep_output(outputs: dict[int, Tensor], index: int, module: Any, given: Any, returned: Any) -> None:
    """A forward hook that puts an attention module's output aside."""
    outputs[index] = returned[0].detach()


def keep_pattern(patterns: dict[int, Tensor], layer: int, pattern: Tensor, hook: Any) -> None:
    """A TransformerLens hook that puts a pattern aside."""
    patterns[layer] = pattern.detach()


def _scene(ids: Tensor, geometry: Mapping[str, Any]) -> Scene:
    return Scene(ids.shape[1], 0, geometry["n_layers"], geometry["n_heads"], geometry["windows"], geometry["has_sink"])


def _mask() -> KVMask:
    return KVMask(keys=(MASKED_KEY, MASKED_KEY + 1), queries="after")


def _whole(pattern: Tensor, geometry: Mapping[str, Any]) -> bool:
    """Rows still sum to 1 after the edit (an edit of a finished pattern would leave them short)."""
    sums = pattern.float().sum(-1)
    slack = max(1e-4, 8 * torch.finfo(pattern.dtype).eps)
    return bool((sums <= 1 + slack).all()) and (geometry["has_sink"] or bool((sums >= 1 - slack).all()))

"""Span ablations: kvprobe against the TransformerLens loop, and against the loop that an expert writes by hand."""

from __future__ import annotations

import copy
import statistics
from typing import Any

import torch
from timing import gemm_flops_per_s, once
from torch import Tensor

import kvprobe as kp

SUFFIX, WIDTH, ARMS = 35, 20, 64
TOLERANCE = 5e-4


class Setting:
    """One prompt of 1,500 tokens and the spans to cut, the same for every contender."""

    def __init__(self, model: Any, length: int = 1500) -> None:
        self.model = model
        item = kp.tasks.make("niah_single_2", model, length=length, seed=0, tokens_to_generate=0, distractors=0)
        self.prompt = item.prompt
        self.ids = item.prompt.ids[None]
        self.n = len(item.prompt)
        self.start = self.n - SUFFIX
        step = (self.start - WIDTH - 4) // ARMS
        self.spans = [(4 + step * arm, 4 + step * arm + WIDTH) for arm in range(ARMS)]
        self.masks = [kp.KVMask(keys=span) for span in self.spans]

    def ours(self, arms: int = ARMS) -> list[Tensor]:
        """Prefill included."""
        outcomes = kp.intervene(self.model, self.prompt, self.masks[:arms], suffix=SUFFIX, keep_trace=False)
        return [outcome.logits for outcome in outcomes]

    def transformer_lens(self, arm: int) -> Tensor:
        """The plain loop: a full run with hooks that edit scores in place."""
        start, stop = self.spans[arm]

        def cut(scores: Tensor, hook: Any) -> Tensor:
            scores[:, :, self.start :, start:stop] = -torch.inf
            return scores

        hooks = [(f"blocks.{layer}.attn.hook_attn_scores", cut) for layer in range(self.model.geometry.n_layers)]
        with torch.no_grad():
            return self.model.bridge.run_with_hooks(self.ids, fwd_hooks=hooks, prepend_bos=False)[0, self.start :]

    def prefill(self) -> Any:
        """transformers' SDPA prefill of the context, as anyone would write it."""
        from transformers import DynamicCache

        cache = DynamicCache()
        with torch.no_grad():
            self.model.twin(self.ids[:, : self.start], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def by_hand(self, prefix: Any, arm: int) -> Tensor:
        """An expert's loop: deep-copy the cache, delete the span's columns, keep positions, run the suffix."""
        cache = copy.deepcopy(prefix)
        return self._suffix(cache, cache, arm)

    def by_slices(self, prefix: Any, arm: int) -> Tensor:
        """The same without the copy: a new cache from slices."""
        from transformers import DynamicCache

        return self._suffix(prefix, DynamicCache(), arm)

    def _suffix(self, source: Any, cache: Any, arm: int) -> Tensor:
        start, stop = self.spans[arm]
        for index, layer in enumerate(source.layers):
            parts = [torch.cat([part[:, :, :start], part[:, :, stop:]], 2) for part in (layer.keys, layer.values)]
            if source is cache:
                layer.keys, layer.values = parts
            else:
                cache.update(*parts, index)
        positions = torch.arange(self.start, self.n)[None]
        with torch.no_grad():
            return self.model.twin(
                self.ids[:, self.start :], past_key_values=cache, position_ids=positions, use_cache=True
            ).logits[0]


def flops_per_arm(model: Any, suffix: int, n: int) -> float:
    """Multiply-adds × 2 of blocks, head and attention of the suffix."""
    geometry = model.geometry
    head = geometry.vocab * geometry.d_model
    blocks = sum(p.numel() for name, p in model.twin.named_parameters() if "layers" in name and p.dim() == 2)
    attention = geometry.n_layers * geometry.n_heads * geometry.head_dim * n * 2
    return 2.0 * suffix * (blocks + head + attention)


def run(model: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Correctness gate, then ratios and the seconds behind them."""
    setting = Setting(model)
    model.twin.set_attn_implementation("sdpa")
    prefix = setting.prefill()
    by_hand = [setting.by_hand(prefix, arm) for arm in range(2)]
    by_slices = [setting.by_slices(prefix, arm) for arm in range(2)]
    model.twin.set_attn_implementation("kvprobe")
    loop = [setting.transformer_lens(0)]
    gate = max(
        float((mine - theirs).abs().max())
        for group in (loop, by_hand, by_slices)
        for mine, theirs in zip(setting.ours(len(group)), group, strict=True)
    )
    assert gate <= TOLERANCE, f"ablation: contenders differ by {gate:.2g}, allowed {TOLERANCE}"
    seconds = {"ours": [], "transformer_lens": [], "hf_cache": [], "hf_slices": [], "limit": []}
    setting.ours()
    for round_ in range(3):
        rate = gemm_flops_per_s()
        seconds["limit"].append(flops_per_arm(model, SUFFIX, setting.n) / rate)
        seconds["ours"].append(once(setting.ours) / ARMS)
        model.twin.set_attn_implementation("sdpa")
        shared = once(setting.prefill) / ARMS
        arms = range(4 * round_, 4 * round_ + 4)
        for name, contender in (("hf_cache", setting.by_hand), ("hf_slices", setting.by_slices)):
            seconds[name].append(shared + once(lambda c=contender, a=arms: [c(prefix, arm) for arm in a]) / 4)
        model.twin.set_attn_implementation("kvprobe")
        seconds["transformer_lens"].append(once(lambda r=round_: setting.transformer_lens(r)))
    pairs = {name: [a / b for a, b in zip(values, seconds["ours"], strict=True)] for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in pairs.items()}
    ratios = {
        "ablation_speedup": medians["transformer_lens"],
        "ablation_speedup_hf_cache": medians["hf_cache"],
        "ablation_speedup_hf_slices": medians["hf_slices"],
        "ablation_over_limit": 1 / medians["limit"],
    }
    return ratios, {f"{name}_s_per_arm": statistics.median(values) for name, values in seconds.items()} | {
        "ablation_max_abs_diff": gate
    }

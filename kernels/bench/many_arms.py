"""256 arms of one item, as a placebo run has them: kvprobe against the TransformerLens loop and the FLOP limit.

The question and the teacher-forced answer run under every arm; only the rows that predict the answer get logits.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from ablation import TOLERANCE
from timing import gemm_flops_per_s, once
from torch import Tensor

import kvprobe as kp

ARMS, QUESTION, ANSWER, WIDTH = 256, 30, 5, 20


class Setting:
    """One item of 1,500 tokens whose last ``ANSWER`` are the answer, and the spans that are cut or gated."""

    def __init__(self, model: Any, arms: int = ARMS, length: int = 1500) -> None:
        item = kp.tasks.make("niah_single_2", model, length=length, seed=0, tokens_to_generate=0, distractors=0)
        self.model, self.ids = model, item.prompt.ids
        self.n = len(self.ids)
        self.prompt = kp.Prompt.from_ids(self.ids[:-ANSWER])
        self.answer = self.ids[-ANSWER:]
        self.start = self.n - ANSWER - QUESTION
        step = max(1, (self.start - WIDTH - 4) // arms)
        self.spans = [(4 + step * arm, 4 + step * arm + WIDTH) for arm in range(arms)]
        self.masks = [kp.KVMask(keys=span) for span in self.spans]
        self.gates = [kp.ValueGate(keys=span) for span in self.spans]

    def ours(self, arms: list[Any]) -> list[Tensor]:
        """Prefill included: logits of the rows that predict the answer, and of the one behind it."""
        options: dict[str, Any] = {"suffix": QUESTION, "continuation": self.answer, "logits": "continuation"}
        outcomes = kp.intervene(self.model, self.prompt, arms, keep_trace=False, **options)
        return [outcome.logits for outcome in outcomes]

    def transformer_lens(self, arm: int, gate: bool = False) -> Tensor:
        """The plain loop: a full run with hooks that edit scores (or the pattern) in place."""
        start, stop = self.spans[arm]

        def edit(scores: Tensor, hook: Any) -> Tensor:
            scores[:, :, self.start :, start:stop] = 0 if gate else -torch.inf
            return scores

        point = "hook_pattern" if gate else "hook_attn_scores"
        hooks = [(f"blocks.{layer}.attn.{point}", edit) for layer in range(self.model.geometry.n_layers)]
        with torch.no_grad():
            logits = self.model.bridge.run_with_hooks(self.ids[None], fwd_hooks=hooks, prepend_bos=False)
        return logits[0, -ANSWER - 1 :]

    def largest_difference(self) -> float:
        """Between ours and the loop's logits, first and last arm, masked and gated."""
        ends = (0, len(self.spans) - 1)
        found = []
        for gate, arms in ((False, self.masks), (True, self.gates)):
            mine = self.ours([arms[end] for end in ends])
            theirs = [self.transformer_lens(end, gate) for end in ends]
            found += [float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True)]
        return max(found)


def flops_per_arm(model: Any, n: int) -> float:
    """Multiply-adds × 2 of the blocks and attention of all rows of an arm, and of the head where logits are asked."""
    geometry, rows = model.geometry, QUESTION + ANSWER
    blocks = sum(p.numel() for name, p in model.twin.named_parameters() if "layers" in name and p.dim() == 2)
    attention = geometry.n_layers * geometry.n_heads * geometry.head_dim * n * 2
    return 2.0 * (rows * (blocks + attention) + (ANSWER + 1) * geometry.vocab * geometry.d_model)


def run(model: Any, arms: int = ARMS, rounds: int = 3) -> tuple[dict[str, float], dict[str, float]]:
    """Correctness gate, then ratios and the seconds behind them."""
    setting = Setting(model, arms)
    difference = setting.largest_difference()
    assert difference <= TOLERANCE, f"many arms: contenders differ by {difference:.2g}, allowed {TOLERANCE}"
    seconds: dict[str, list[float]] = {"ours": [], "gates": [], "transformer_lens": [], "limit": []}
    setting.ours(setting.masks[: max(2, arms // 8)])
    for round_ in range(rounds):
        seconds["limit"].append(flops_per_arm(model, setting.n) / gemm_flops_per_s())
        seconds["ours"].append(once(lambda: setting.ours(setting.masks)) / arms)
        seconds["gates"].append(once(lambda: setting.ours(setting.gates)) / arms)
        seconds["transformer_lens"].append(once(lambda at=round_ % arms: setting.transformer_lens(at)))
    pairs = {name: [a / b for a, b in zip(values, seconds["ours"], strict=True)] for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in pairs.items()}
    ratios = {
        "many_arms_speedup": medians["transformer_lens"],
        "many_arms_over_limit": 1 / medians["limit"],
        "many_gates_over_masks": medians["gates"],
    }
    return ratios, {f"many_arms_{name}_s_per_arm": statistics.median(values) for name, values in seconds.items()} | {
        "many_arms_max_abs_diff": difference
    }

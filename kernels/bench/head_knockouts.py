"""The evidence masked in every head alone, one item: kvprobe against the TransformerLens loop and the FLOP limit.

Ours is the whole of ``kp.heads.knockouts``: prefill, every arm, and the closed forms of the clean run.
"""

from __future__ import annotations

import statistics
from typing import Any

import pandas as pd
import torch
from ablation import TOLERANCE
from timing import gemm_flops_per_s, once
from torch import Tensor

import kvprobe as kp


class Setting:
    """One item with its answer teacher-forced, and every head of the model as an arm."""

    def __init__(self, model: Any, length: int = 1500) -> None:
        self.model = model
        self.item = kp.tasks.make("niah_single_2", model, length=length, seed=0, tokens_to_generate=0, distractors=0)
        self.ids = torch.cat([self.item.prompt.ids, torch.tensor(self.item.answer_ids)])
        self.span = self.item.spans["evidence"][0]
        geometry = model.geometry
        self.heads = [(layer, head) for layer in range(geometry.n_layers) for head in range(geometry.n_heads)]

    def ours(self) -> pd.DataFrame:
        """Everything, prefill included."""
        return kp.heads.knockouts(self.model, self.item)

    def transformer_lens(self, arm: int | None) -> Tensor:
        """The plain loop: a full run with a hook that edits one head's scores in place; None: a run without."""

        def cut(scores: Tensor, hook: Any) -> Tensor:
            scores[:, self.heads[arm][1], self.item.context_stop :, slice(*self.span)] = -torch.inf
            return scores

        hooks = [] if arm is None else [(f"blocks.{self.heads[arm][0]}.attn.hook_attn_scores", cut)]
        with torch.no_grad():
            logits = self.model.bridge.run_with_hooks(self.ids[None], fwd_hooks=hooks, prepend_bos=False)[0]
        return logits[len(self.item.prompt) - 1 : -1]

    def largest_difference(self) -> float:
        """Between ours and the loop's Δ log-prob and KL: first and last head, and the head that matters most."""
        frame, clean = self.ours(), self.transformer_lens(None)
        assert len(frame) == len(self.heads)
        found = []
        for arm in {0, len(frame) - 1, int(frame["delta_logprob"].to_numpy().argmin())}:
            logits, mine = self.transformer_lens(arm), frame.iloc[arm]
            gold = [float(kp.outcomes.answer_logprobs(each, self.item.answer_ids).sum()) for each in (logits, clean)]
            kl = float(kp.outcomes.kl_divergence(clean, logits).sum())
            found += [abs(gold[0] - gold[1] - float(mine["delta_logprob"])), abs(kl - float(mine["kl"]))]
        return max(found)

    def flops(self) -> float:
        """Multiply-adds × 2 of what no arm shares: all its rows from its head's layer on, and the answer's logits."""
        geometry = self.model.geometry
        rows = len(self.ids) - self.item.context_stop
        blocks = sum(p.numel() for name, p in self.model.twin.named_parameters() if "layers" in name and p.dim() == 2)
        attention = geometry.n_layers * geometry.n_heads * geometry.head_dim * len(self.ids) * 2
        layers = (geometry.n_layers + 1) / (2 * geometry.n_layers)
        head = (len(self.item.answer_ids) + 1) * geometry.vocab * geometry.d_model
        return 2.0 * len(self.heads) * (layers * rows * (blocks + attention) + head)


def run(model: Any, length: int = 1500, rounds: int = 3) -> tuple[dict[str, float], dict[str, float]]:
    """Correctness gate, then ratios and the seconds behind them."""
    setting = Setting(model, length)
    difference = setting.largest_difference()
    assert difference <= TOLERANCE, f"head knockouts: contenders differ by {difference:.2g}, allowed {TOLERANCE}"
    arms = len(setting.heads)
    seconds: dict[str, list[float]] = {"ours": [], "transformer_lens": [], "limit": []}
    for round_ in range(rounds):
        seconds["limit"].append(setting.flops() / arms / gemm_flops_per_s())
        seconds["ours"].append(once(setting.ours) / arms)
        arm = round_ * (arms - 1) // max(1, rounds - 1)
        seconds["transformer_lens"].append(once(lambda at=arm: setting.transformer_lens(at)))
    pairs = {name: [a / b for a, b in zip(values, seconds["ours"], strict=True)] for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in pairs.items()}
    ratios = {
        "head_knockouts_speedup": medians["transformer_lens"],
        "head_knockouts_over_limit": 1 / medians["limit"],
    }
    return ratios, {
        f"head_knockouts_{name}_s_per_arm": statistics.median(values) for name, values in seconds.items()
    } | {"head_knockouts_max_abs_diff": difference}

"""All bounds of many kept sets against a hand-written sweep over the sets; correctness first."""

from __future__ import annotations

import torch
from timing import in_turn
from torch import Tensor

from kvprobe.theory import consequences, per_query_head

# SmolLM2-135M's layer: query heads, kv heads, head width, model width; an audit's sets: 2 policies × 2 presets × 3.
HEADS, KV_HEADS, WIDTH, MODEL = 9, 3, 64, 576
SETS, KEYS = 12, 1500
TOLERANCE = 1e-9


def by_hand(A: Tensor, V: Tensor, W_O: Tensor, keep: Tensor) -> Tensor:
    """L, θ_c and θ [3, S, H] as an expert would write them: project all values once, then take set by set."""
    projected = per_query_head(V, len(A)) @ W_O
    m = projected.abs().sum(-1)
    found = []
    for mine in keep:
        kept, lost = A * mine, A * ~mine
        a, R = lost.sum(-1), kept.sum(-1)
        out = (kept[:, None] @ projected)[:, 0] / R[:, None]
        L = (a[:, None] * out - (lost[:, None] @ projected)[:, 0]).abs().sum(-1)
        centred = (lost * (projected - out[:, None]).abs().sum(-1)).sum(-1)
        found.append(torch.stack([L, centred, (lost * m).sum(-1) + a / R * (kept * m).sum(-1)]))
    return torch.stack(found, 1)


def run() -> tuple[dict[str, float], dict[str, float]]:
    """``audit_speedup``: the hand-written sweep's time over ours, both in float64; and the seconds a layer."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(HEADS, KEYS, generator=generator, dtype=torch.float64).mul(3).softmax(-1)
    V = torch.randn(KV_HEADS, KEYS, WIDTH, generator=generator, dtype=torch.float64)
    W_O = torch.randn(HEADS, WIDTH, MODEL, generator=generator, dtype=torch.float64) / WIDTH**0.5
    keep = torch.rand(SETS, HEADS, KEYS, generator=generator) < 0.2
    ours, theirs = consequences(A, V, W_O, keep), by_hand(A, V, W_O, keep)
    same = torch.stack([ours.perturbation, ours.centred_bound, ours.bound])
    worst = float(((same - theirs) / theirs).abs().max())
    assert worst <= TOLERANCE, f"consequences: {worst:.2g} off the hand-written sweep, allowed {TOLERANCE}"
    hand, fast, ratio = in_turn(lambda: by_hand(A, V, W_O, keep), lambda: consequences(A, V, W_O, keep), 7)
    measured = {"audit_by_hand_s": hand, "audit_s": fast, "audit_rel_diff": worst}
    return {"audit_speedup": ratio}, measured


if __name__ == "__main__":
    print(run())

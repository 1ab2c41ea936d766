"""The fast operations against the plain torch lines they replace; correctness first."""

from __future__ import annotations

import torch
from timing import in_turn
from torch import Tensor

from kvprobe_kernels import projected_norm

# SmolLM2-135M's layer: query heads, kv heads, head width, model width.
HEADS, KV_HEADS, WIDTH, MODEL = 9, 3, 64, 576
TOLERANCE = 1e-5


def per_head_loop(V: Tensor, W_O: Tensor, p: int = 1) -> Tensor:
    """As anyone would write it: each head's projected values in full, then their norm, then the group's mean."""
    group = W_O.shape[0] // V.shape[0]
    norms = [(V[h // group] @ W_O[h]).norm(p=p, dim=-1) for h in range(W_O.shape[0])]
    return torch.stack(norms).unflatten(0, (V.shape[0], group)).mean(1)


def run() -> tuple[dict[str, float], dict[str, float]]:
    """``projected_norm_speedup_2k`` and ``_32k`` over the loop, ``projected_norm_l2_over_l1``, and the seconds."""
    ratios: dict[str, float] = {}
    measured: dict[str, float] = {}
    for label, n, rounds in (("2k", 2048, 15), ("32k", 32768, 5)):
        generator = torch.Generator().manual_seed(0)
        V = torch.randn(KV_HEADS, n, WIDTH, generator=generator)
        W_O = torch.randn(HEADS, WIDTH, MODEL, generator=generator) / WIDTH**0.5
        measured[f"projected_norm_rel_diff_{label}"] = _gate(V, W_O)
        loop, ours, ratio = in_turn(
            lambda V=V, W=W_O: per_head_loop(V, W), lambda V=V, W=W_O: projected_norm(V, W), rounds
        )
        ratios[f"projected_norm_speedup_{label}"] = ratio
        measured |= {f"per_head_loop_s_{label}": loop, f"projected_norm_s_{label}": ours}
    two, _, ratio = in_turn(lambda: projected_norm(V, W_O, 2), lambda: projected_norm(V, W_O), 5)
    return ratios | {"projected_norm_l2_over_l1": ratio}, measured | {"projected_norm_l2_s_32k": two}


def _gate(V: Tensor, W_O: Tensor) -> float:
    """Largest relative difference from the float64 loop, on some rows of each length; both norms."""
    rows = V[:, :: max(1, V.shape[1] // 512)]
    worst = 0.0
    for p in (1, 2):
        truth = projected_norm(rows.double(), W_O.double(), p, backend="reference")
        found = projected_norm(V, W_O, p)[:, :: max(1, V.shape[1] // 512)]
        worst = max(worst, float(((found - truth) / truth).abs().max()))
    assert worst <= TOLERANCE, f"projected_norm: {worst:.2g} off the float64 loop, allowed {TOLERANCE}"
    return worst


if __name__ == "__main__":
    print(run())

"""The slow line: every head's projected values in full, float64."""

from __future__ import annotations

import torch
from torch import Tensor


def projected_norm(V: Tensor, W_O: Tensor, p: int, group: str, centre: Tensor | None) -> Tensor:
    """See :func:`kvprobe_kernels.projected_norm.projected_norm`; arguments are checked there."""
    H, K = W_O.shape[0], V.shape[-3]
    G = H // K
    heads = []
    for h in range(H):
        projected = V[..., h // G, :, :].double() @ W_O[h].double()
        if centre is not None:
            projected = projected - centre[..., h, None, :].double()
        powers = projected.abs() ** p
        heads.append(powers.sum(-1) ** (1 / p))
    if group == "mean":
        heads = [torch.stack(heads[k * G : (k + 1) * G]).mean(0) for k in range(K)]
    wide = torch.float64 in (V.dtype, W_O.dtype)
    return torch.stack(heads, -2).to(torch.float64 if wide else torch.float32)

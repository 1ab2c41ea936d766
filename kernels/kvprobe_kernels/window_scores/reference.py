"""Window scores, one query row at a time, in fp64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def window_scores(
    queries: Tensor, keys: Tensor, alive: Tensor | None, scale: float, pool: str, kernel: int, group: str
) -> Tensor:
    """Mean attention of each query head's rows to the keys before the window, pooled, then reduced over the group.

    Parameters
    ----------
    queries : Tensor, [N, G, w, d]
        N kv heads (batch included) with G query heads each.
    keys : Tensor, [N, n, d]
        Their keys, n > w.
    alive : bool Tensor, [N, n], optional
        False where a key is evicted.
    scale, pool, kernel, group
        As in the public function.

    Returns
    -------
    Tensor, [N, 1 or G, n - w]
    """
    count, heads, w, _ = queries.shape
    before = keys.shape[1] - w
    scores = torch.zeros(count, heads, before, dtype=torch.float64)
    for i in range(count):
        living = None if alive is None else alive[i]
        for g in range(heads):
            for row in range(w):
                weight = _attention(queries[i, g, row], keys[i], living, before + row, scale)
                scores[i, g] += weight[:before] / w
            scores[i, g] = _pooled(scores[i, g], pool, kernel)
    if group != "none":
        scores = scores.mean(1, keepdim=True) if group == "mean" else scores.amax(1, keepdim=True)
    double = torch.float64 in (queries.dtype, keys.dtype)
    return scores.to(queries.device, torch.float64 if double else torch.float32)


def _attention(query: Tensor, keys: Tensor, alive: Tensor | None, position: int, scale: float) -> Tensor:
    """Attention row of the query at ``position``: [d], [n, d] → [n]. All 0 if no key is left to see."""
    logits = scale * (keys.double().cpu() @ query.double().cpu())
    logits[position + 1 :] = -math.inf
    if alive is not None:
        logits[~alive.cpu()] = -math.inf
    return torch.zeros_like(logits) if logits.max() == -math.inf else logits.softmax(0)


def _pooled(scores: Tensor, pool: str, kernel: int) -> Tensor:
    if pool == "none":
        return scores
    half = kernel // 2
    around = [scores[max(0, i - half) : i + half + 1] for i in range(len(scores))]
    return torch.stack([part.max() if pool == "max" else part.sum() / kernel for part in around])

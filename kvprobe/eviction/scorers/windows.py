"""Observation windows: attention of the last queries over what came before them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.layer import Layer
from kvprobe.eviction.scorers import settings
from kvprobe_kernels import window_scores

Pooling = Literal["avg", "max", "none"]
POOLINGS = ("avg", "max", "none")


def check_window(scorer: Any) -> None:
    """Refuse a window, pooling or kernel that makes no sense."""
    settings.whole("window", scorer.window, 1)
    if scorer.pool not in POOLINGS:
        raise EvictionError(f"pool={quote(scorer.pool)}; allowed: {', '.join(POOLINGS)}")
    if (
        isinstance(scorer.kernel, bool)
        or not isinstance(scorer.kernel, int)
        or scorer.kernel < 1
        or scorer.kernel % 2 == 0
    ):
        raise EvictionError(f"kernel={quote(scorer.kernel)}; allowed: an odd whole number ≥ 1")


def window_means(layer: Layer, window: int, pool: Pooling, kernel: int) -> Tensor:
    """Mean attention of the last ``window`` queries, pooled, [J, n]; the window's own columns get 0.

    Plain layers go through the fused operation; those with a sliding window, soft-cap or learned sinks, which it does
    not know, through the same arithmetic in blocks of rows.
    """
    if not layer.spec.plain:
        means = layer.mean_attention(window)[:, : layer.n - window]
        return layer.per_set(_padded(pooled(means, pool, kernel), window))
    group = "mean" if layer.granularity == "kv_head" else "none"
    alive = layer.alive if layer.ragged else None
    rows, scale = layer.rows(window), layer.spec.scale
    return _padded(window_scores(rows, layer.keys, pool, kernel, group, scale=scale, alive=alive), window)


def pooled(scores: Tensor, pool: Pooling, kernel: int) -> Tensor:
    """Pool over positions: ``avg`` pads with zeros and always divides by the kernel, ``max`` pads with nothing."""
    if pool == "none" or scores.shape[-1] == 0:
        return scores
    if pool == "avg":
        return functional.avg_pool1d(scores[None], kernel, 1, kernel // 2, count_include_pad=True)[0]
    return functional.max_pool1d(scores[None], kernel, 1, kernel // 2)[0]


def _padded(scores: Tensor, window: int) -> Tensor:
    return torch.cat([scores, scores.new_zeros(scores.shape[0], window)], -1)

"""Window scores with one matrix product a block of logits, and never more than a bounded block of them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kvprobe_kernels.precision import exact_products

_CPU_BYTES, _GPU_BYTES = 8 << 20, 256 << 20


def window_scores(
    queries: Tensor,
    keys: Tensor,
    alive: Tensor | None,
    scale: float,
    pool: str,
    kernel: int,
    group: str,
    *,
    block_bytes: int | None = None,
) -> Tensor:
    """Mean attention to the keys before the window, pooled and reduced: as ``reference.window_scores``.

    ``block_bytes`` bounds the logits (and an upcast piece of K) that exist at a time. While one kv head's rows fit, K
    is read once; beyond that it is read twice, in tiles: for the rows' maxima and sums, then for the columns.
    """
    if block_bytes is None:
        block_bytes = _CPU_BYTES if queries.device.type == "cpu" else _GPU_BYTES
    with torch.no_grad(), exact_products(queries.device.type):
        return _reduced(_pooled(_columns(queries, keys, alive, scale, block_bytes), pool, kernel), group)


def _columns(queries: Tensor, keys: Tensor, alive: Tensor | None, scale: float, block_bytes: int) -> Tensor:
    """Each query head's mean attention row over the window: [N, G, w, d], [N, n, d] → [N, G, n - w]."""
    count, heads, w, d = queries.shape
    n = keys.shape[1]
    work = torch.float64 if torch.float64 in (queries.dtype, keys.dtype) else torch.float32
    scaled = queries.to(work).mul(scale).reshape(count, heads * w, d)
    # An evicted key as a bias of its logit: adding is several times as fast as filling by a mask.
    bias = None if alive is None else torch.where(alive, 0.0, -math.inf).to(work)
    columns = torch.empty(count, heads, n - w, dtype=work, device=keys.device)
    per_key = (heads * w + d) * scaled.element_size()
    together = block_bytes // (per_key * n)
    tile = n if together else max(1, block_bytes // per_key)
    for start in range(0, count, max(1, together)):
        part = slice(start, start + max(1, together))
        block = _Blocks(scaled[part], keys[part], None if bias is None else bias[part], heads, w)
        (block.once if together else block.twice)(columns[part], tile)
    return columns


class _Blocks:
    """The logits of a few kv heads, by ranges of keys."""

    def __init__(self, queries: Tensor, keys: Tensor, bias: Tensor | None, heads: int, w: int):
        self.queries, self.keys, self.bias, self.heads, self.w = queries, keys, bias, heads, w
        self.before = keys.shape[1] - w
        self.future = torch.full((w, w), -math.inf, dtype=queries.dtype, device=queries.device).triu_(1)

    def once(self, columns: Tensor, tile: int) -> None:
        """All keys in one block: its exponentials serve the sums and the columns."""
        block = self._logits(0, tile)
        top = _finite(block.amax(-1, keepdim=True))
        block.sub_(top).exp_()
        self._write(columns, block, block.sum(-1))

    def twice(self, columns: Tensor, tile: int) -> None:
        """Tiles of keys: first the rows' maxima and sums, then the columns of the keys before the window."""
        shape = (*self.queries.shape[:-1], 1)
        top = torch.full(shape, -math.inf, dtype=self.queries.dtype, device=self.queries.device)
        total = torch.zeros_like(top)
        for start in range(0, self.keys.shape[1], tile):
            block = self._logits(start, start + tile)
            higher = torch.maximum(top, block.amax(-1, keepdim=True))
            reference = _finite(higher)
            total = total.mul_((top - reference).exp_()).add_(block.sub_(reference).exp_().sum(-1, keepdim=True))
            top = higher
        for start in range(0, self.before, tile):
            stop = min(start + tile, self.before)
            block = self._logits(start, stop).sub_(_finite(top)).exp_()
            self._write(columns[..., start:stop], block, total[..., 0])

    def _logits(self, start: int, stop: int) -> Tensor:
        """Logits [c, G w, stop - start] with -inf for what a row does not see."""
        stop = min(stop, self.keys.shape[1])
        block = torch.bmm(self.queries, self.keys[:, start:stop].to(self.queries.dtype).mT)
        if self.bias is not None:
            block += self.bias[:, None, start:stop]
        if stop > self.before:
            own = max(start, self.before)
            rows = block.unflatten(1, (self.heads, self.w))
            rows[..., own - start :] += self.future[:, own - self.before : stop - self.before]
        return block

    def _write(self, columns: Tensor, block: Tensor, total: Tensor) -> None:
        """Mean over each head's rows of block / total, as a product with the row of weights 1 / (w total)."""
        # A row whose keys are all dead has total 0, and weight 0.
        weight = torch.where(total > 0, 1 / (self.w * total), 0)
        # The window's own columns go after the product: a block cut before it would be copied.
        means = torch.bmm(weight.view(-1, 1, self.w), block.view(-1, self.w, block.shape[-1]))
        columns.copy_(means.view(*columns.shape[:2], -1)[..., : columns.shape[-1]])


def _finite(top: Tensor) -> Tensor:
    """A row maximum that can be subtracted: -inf - -inf is NaN, where the exponential must be 0."""
    return top.clamp(min=torch.finfo(top.dtype).min)


def _pooled(columns: Tensor, pool: str, kernel: int) -> Tensor:
    if kernel == 1:
        return columns
    half = kernel // 2
    if pool == "max":
        return F.max_pool1d(columns, kernel, stride=1, padding=half)
    # Four times as fast as avg_pool1d on a CPU, and as exact: every window is summed afresh.
    return F.pad(columns, (half, half)).unfold(-1, kernel, 1).mean(-1)


def _reduced(scores: Tensor, group: str) -> Tensor:
    if group == "none":
        return scores
    return scores.mean(1, keepdim=True) if group == "mean" else scores.amax(1, keepdim=True)

"""Window scores in Triton: row statistics by ranges of keys, column means by tiles of keys, then pooling.

Three kernels. ``_row_statistics`` takes a tile of the G·w rows of one kv head and a range of keys, and leaves each
row's maximum and sum over the range: programs enough for a GPU, however few the heads. ``_column_means`` recomputes a
tile of logits and adds its rows up: no logit is ever stored. ``_pool`` reads the means, one number a position where a
key is d of them: pooling inside the second kernel would compute the logits of a halo twice.
"""

# Triton's kernels take its own values, which have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# With four warps or twice the dims, some architecture spills.
_ROWS, _KEYS, _DIMS, _WARPS = 32, 64, 16, 8
_RANGE, _POSITIONS = 2048, 256
_TILES: dict[str, Any] = {"ROWS": _ROWS, "KEYS": _KEYS, "DIMS": _DIMS}


def window_scores(
    queries: Tensor, keys: Tensor, alive: Tensor | None, scale: float, pool: str, kernel: int, group: str
) -> Tensor:
    """Mean attention to the keys before the window, pooled and reduced: as ``reference.window_scores``."""
    count, heads, w, d = queries.shape
    n, device = keys.shape[1], keys.device
    queries = queries.contiguous()
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    # An absent mask is never read, but its argument must be a pointer of the right type.
    masked, living = alive is not None, torch.empty(1, dtype=torch.bool, device=device) if alive is None else alive
    shared = (queries, keys, living.contiguous(), n, d, w, heads, *keys.stride()[:2], scale)
    ranges = triton.cdiv(n, _RANGE)
    tops, totals = torch.empty((2, count, heads * w, ranges), dtype=torch.float32, device=device)
    grid = (count * triton.cdiv(heads * w, _ROWS), ranges)
    _row_statistics[grid](*shared, tops, totals, ranges, MASKED=masked, RANGE=_RANGE, **_TILES, num_warps=_WARPS)
    top, weight = _joined(tops, totals, w)
    means = torch.empty((count, heads, n - w), dtype=torch.float32, device=device)
    grid = (count * heads, triton.cdiv(n - w, _KEYS))
    _column_means[grid](*shared, top, weight, means, MASKED=masked, **_TILES, num_warps=_WARPS)
    if group == "none":
        count, heads = count * heads, 1
    out = torch.empty((count, n - w), dtype=torch.float32, device=device)
    grid = (count, triton.cdiv(n - w, _POSITIONS))
    options = {"MAX_POOL": pool == "max", "MAX_GROUP": group == "max", "POSITIONS": _POSITIONS}
    _pool[grid](means, out, n - w, heads, kernel, **options, num_warps=_WARPS)
    return out.view(queries.shape[0], -1, n - w)


def _joined(tops: Tensor, totals: Tensor, w: int) -> tuple[Tensor, Tensor]:
    """Maximum and weight 1 / (w sum) of each row from its ranges; weight 0 for a row whose keys are all dead."""
    top = tops.amax(-1, keepdim=True).clamp(min=torch.finfo(tops.dtype).min)
    total = (totals * (tops - top).exp()).sum(-1)
    return top[..., 0].contiguous(), torch.where(total > 0, 1 / (w * total), 0.0)


def aot_cases() -> Iterator[tuple[str, Any, dict[str, str], dict[str, object], dict[str, int]]]:
    """Every configuration launched, to compile without a GPU: (name, kernel, types, constants, options)."""
    integers = dict.fromkeys(("n", "d", "w", "heads", "k_head", "k_row"), "i32")
    rows = {"tops": "*fp32", "totals": "*fp32", "ranges": "i32"}
    columns = {"top": "*fp32", "weight": "*fp32", "means": "*fp32"}
    for dtype in ("fp32", "bf16", "fp16"):
        for masked in (False, True):
            name = f"{dtype}{'-alive' if masked else ''}"
            shared = {"queries": f"*{dtype}", "keys": f"*{dtype}", "alive": "*i1", **integers, "scale": "fp32"}
            constants: dict[str, object] = {"MASKED": masked, **_TILES}
            yield _case(f"columns-{name}", _column_means, shared | columns, constants)
            yield _case(f"rows-{name}", _row_statistics, shared | rows, {**constants, "RANGE": _RANGE})
    for pool in (False, True):
        for group in (False, True):
            types = {"means": "*fp32", "out": "*fp32", "length": "i32", "heads": "i32", "kernel": "i32"}
            constants = {"MAX_POOL": pool, "MAX_GROUP": group, "POSITIONS": _POSITIONS}
            yield _case(f"pool-{pool:d}{group:d}", _pool, types, constants)


def _case(name: str, kernel: Any, types: dict[str, str], constants: dict[str, object]) -> tuple[Any, ...]:
    types = types | dict.fromkeys(constants, "constexpr")
    return name, kernel, {argument: types[argument] for argument in kernel.arg_names}, constants, {"num_warps": _WARPS}


@triton.jit
def _logits(
    queries, keys, alive, rows, row_count, at, n, d, w, k_row, scale,
    MASKED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Logits [ROWS, KEYS] in fp32 of some rows and keys of one kv head; -inf for what a row does not see."""
    product = tl.zeros((ROWS, KEYS), tl.float32)
    for start in range(0, d, DIMS):
        dims = start + tl.arange(0, DIMS)
        inside = (rows[:, None] < row_count) & (dims[None, :] < d)
        q = tl.load(queries + rows[:, None] * d + dims[None, :], mask=inside, other=0.0)
        inside = (at[None, :] < n) & (dims[:, None] < d)
        k = tl.load(keys + at[None, :].to(tl.int64) * k_row + dims[:, None], mask=inside, other=0.0)
        product = tl.dot(q.to(tl.float32), k.to(tl.float32), product, input_precision="ieee")
    seen = (at[None, :] <= n - w + rows[:, None] % w) & (at[None, :] < n)
    if MASKED:
        living = tl.load(alive + at, mask=at < n, other=0)
        seen = seen & (living[None, :] != 0)
    return tl.where(seen, product * scale, float("-inf"))


@triton.jit
def _row_statistics(
    queries, keys, alive, n, d, w, heads, k_head, k_row, scale, tops, totals, ranges,
    MASKED: tl.constexpr, RANGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exponentials of a tile of rows over a range of keys."""
    row_count = heads * w
    tiles = tl.cdiv(row_count, ROWS)
    head, part = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(1)
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    queries, keys, alive = queries + head * row_count * d, keys + head * k_head, alive + head * n
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(part * RANGE, min(part * RANGE + RANGE, n), KEYS):
        at = start + tl.arange(0, KEYS)
        logits = _logits(queries, keys, alive, rows, row_count, at, n, d, w, k_row, scale, MASKED, ROWS, KEYS, DIMS)
        higher = tl.maximum(top, tl.max(logits, 1))
        # Subtracted in place of a maximum of -inf, since -inf - -inf is NaN where the exponential must be 0.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(logits - base[:, None]), 1)
        top = higher
    out = (head * row_count + rows) * ranges + part
    tl.store(tops + out, top, mask=rows < row_count)
    tl.store(totals + out, total, mask=rows < row_count)


@triton.jit
def _column_means(
    queries, keys, alive, n, d, w, heads, k_head, k_row, scale, top, weight, means,
    MASKED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """One query head's mean attention to a tile of the keys before the window."""
    query_head = tl.program_id(0).to(tl.int64)
    head = query_head // heads
    queries, keys, alive = queries + query_head * w * d, keys + head * k_head, alive + head * n
    at = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    mean = tl.zeros((KEYS,), tl.float32)
    for start in range(0, w, ROWS):
        rows = start + tl.arange(0, ROWS)
        logits = _logits(queries, keys, alive, rows, w, at, n, d, w, k_row, scale, MASKED, ROWS, KEYS, DIMS)
        # A row beyond the window has logits of 0 or -inf, and weight 0.
        base = tl.load(top + query_head * w + rows, mask=rows < w, other=0.0)
        share = tl.load(weight + query_head * w + rows, mask=rows < w, other=0.0)
        mean += tl.sum(tl.exp(logits - base[:, None]) * share[:, None], 0)
    tl.store(means + query_head * (n - w) + at, mean, mask=at < n - w)


@triton.jit
def _pool(
    means, out, length, heads, kernel,
    MAX_POOL: tl.constexpr, MAX_GROUP: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Pool each query head of a group over positions, then reduce the group. Means are ≥ 0: maxima start at 0."""
    group = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
    reduced = tl.zeros((POSITIONS,), tl.float32)
    for head in range(heads):
        row = means + (group * heads + head) * length
        pooled = tl.zeros((POSITIONS,), tl.float32)
        for step in range(kernel):
            near = at + step - kernel // 2
            value = tl.load(row + near, mask=(near >= 0) & (near < length), other=0.0)
            pooled = tl.maximum(pooled, value) if MAX_POOL else pooled + value
        pooled = pooled if MAX_POOL else pooled / kernel
        reduced = tl.maximum(reduced, pooled) if MAX_GROUP else reduced + pooled
    reduced = reduced if MAX_GROUP else reduced / heads
    tl.store(out + group * length + at, reduced, mask=at < length)

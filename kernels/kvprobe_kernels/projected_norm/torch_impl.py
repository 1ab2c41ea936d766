"""Projected norms tile by tile with torch's own products; any device.

One tile of projected values is written, reduced while it is still in the cache, and written over by the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil

import torch
from torch import Tensor

from kvprobe_kernels.precision import exact_products
from kvprobe_kernels.projected_norm.factor import narrow

# A thread's share of a tile, with the values it is made from, should stay in its core's L2 cache (2 MiB on current
# servers): reducing it then costs a seventh of the product, and from main memory more than the product. An accelerator
# wants few large launches.
CPU_THREAD_TILE_BYTES = 2 << 20
ACCELERATOR_TILE_BYTES = 128 << 20
# Wider outputs are cut: a tile of few rows does not pay for the product's own packing of the matrix.
TILE_COLUMNS = 1024


def projected_norm(V: Tensor, W_O: Tensor, p: int, group: str, centre: Tensor | None) -> Tensor:
    """See :func:`kvprobe_kernels.projected_norm.projected_norm`; arguments are checked there.

    Memory above inputs and result: one tile, and its share of V and W_O where those need another dtype.
    """
    dtype = torch.promote_types(torch.promote_types(V.dtype, W_O.dtype), torch.float32)
    rest = None
    if p == 2 and centre is None:
        with exact_products(V.device.type):
            return _two_norms(V, narrow(W_O, None)[0].to(dtype), group)
    if p == 2:
        W_O, centre, rest = narrow(W_O, centre)
    H, K, n = W_O.shape[0], V.shape[-3], V.shape[-2]
    G = H // K
    norms = V.new_zeros((*V.shape[:-3], K if group == "mean" else H, n), dtype=dtype)
    tile = _tile(n, V.shape[-1], W_O.shape[-1], dtype, V.device)
    with exact_products(V.device.type):
        for h, b in product(range(H), product(*map(range, V.shape[:-3]))):
            into = norms[(*b, h // G if group == "mean" else h)]
            c = None if centre is None else centre[(*b, h)].to(dtype)
            for rows, sums in _row_sums(V[(*b, h // G)], W_O[h], c, p, tile):
                if p == 2:
                    sums = sums.sqrt_() if rest is None else sums.sqrt_().hypot_(rest[(*b, h)].to(dtype))
                into[rows] += sums
    return norms.div_(G) if group == "mean" else norms


def _two_norms(V: Tensor, L: Tensor, group: str) -> Tensor:
    """‖V L‖₂ for the narrow matrices L ``[H, d, d]``: the heads of a group side by side in one product."""
    *lead, K, n, d = V.shape
    G = L.shape[0] // K
    side = L.view(K, G, d, d).transpose(1, 2).reshape(K, d, G * d)
    norms = V.new_empty((*lead, K, n, G), dtype=L.dtype)
    step = min(n, max(1, _budget(V.device) // (G * d * L.dtype.itemsize)))
    tile = V.new_empty(step, G * d, dtype=L.dtype)
    for b in product(*map(range, (*lead, K))):
        for start in range(0, n, step):
            x = V[b][start : start + step].to(L.dtype)
            y = torch.mm(x, side[b[-1]], out=tile[: x.shape[0]]).view(-1, G, d)
            norms[b][start : start + step] = torch.linalg.vector_norm(y, dim=-1)
    return norms.mean(-1) if group == "mean" else norms.mT.reshape(*lead, K * G, n)


def _budget(device: torch.device) -> int:
    """Bytes of a tile."""
    return CPU_THREAD_TILE_BYTES * torch.get_num_threads() if device.type == "cpu" else ACCELERATOR_TILE_BYTES


def _tile(n: int, d: int, D: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for a tile, ``[rows, columns]`` in the result's dtype."""
    columns = ceil(D / ceil(D / TILE_COLUMNS))
    most = max(1, _budget(device) // ((d + columns) * dtype.itemsize))
    rows = ceil(n / ceil(n / most))
    return torch.empty(rows, columns, dtype=dtype, device=device)


def _row_sums(X: Tensor, W: Tensor, c: Tensor | None, p: int, tile: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Sums over D of |X W − c|ᵖ, block of rows by block of rows."""
    height, width = tile.shape
    for start in range(0, X.shape[0], height):
        x = X[start : start + height].to(tile.dtype)
        sums = None
        for left in range(0, W.shape[1], width):
            columns = W[:, left : left + width].to(tile.dtype)
            part = _powers(x, columns, None if c is None else c[left : left + width], p, tile)
            sums = part if sums is None else sums.add_(part)
        assert sums is not None
        yield slice(start, start + height), sums


def _powers(x: Tensor, W: Tensor, c: Tensor | None, p: int, tile: Tensor) -> Tensor:
    rows, columns = x.shape[0], W.shape[1]
    y = tile.view(-1)[: rows * columns].view(rows, columns)
    if c is None:
        torch.mm(x, W, out=y)
    else:
        torch.addmm(c, x, W, beta=-1, out=y)
    # Two vectorised passes over cached numbers: torch's one-pass 1-norm is scalar and takes as long as the product.
    return (y.abs_() if p == 1 else y.square_()).sum(-1)

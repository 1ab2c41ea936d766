"""Projected norms in one Triton kernel: the projected values live in registers only.

A program takes a block of rows of one kv head's values, multiplies it with W_O tile by tile along D, and adds |·| or
(·)² of each tile to one float32 sum a row. For ``group="mean"`` it does so for each query head of the group, so values
are read once. p = 2 is the same kernel on the narrow matrix of ``factor.py``.
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
from triton.runtime.interpreter import InterpretedFunction

from kvprobe_kernels.projected_norm.factor import narrow


@triton.jit
def projected_norm_kernel(
    V,
    W,
    C,
    rest,
    out,
    n,
    D,
    kv_heads,
    group,
    share,
    v_batch,
    v_head,
    v_row,
    v_col,
    w_head,
    w_row,
    w_col,
    d: tl.constexpr,
    P: tl.constexpr,
    CENTRED: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of rows of one result head; ``share`` query heads go into its mean (G, or 1 for ``group="none"``)."""
    results = kv_heads * group // share
    # 64 bits: offsets of whole heads and batches outgrow 32.
    pid = tl.program_id(0).to(tl.int64)
    batch = pid // results
    result = pid % results
    first = result * share
    start = tl.program_id(1).to(tl.int64) * BLOCK_N
    values = V + batch * v_batch + (first // group) * v_head + start * v_row
    local = tl.arange(0, BLOCK_N)
    inside = local < n - start
    inner = tl.arange(0, BLOCK_K)
    x_at = values + local[:, None] * v_row + inner[None, :] * v_col
    # Heads as narrow as a block keep their values for the whole loop; wider ones read them again for every tile.
    x = tl.load(x_at, mask=inside[:, None] & (inner[None, :] < d), other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    mean = tl.zeros([BLOCK_N], tl.float32)
    for g in range(share):
        head = first + g
        total = tl.zeros([BLOCK_N], tl.float32)
        for left in range(0, D, BLOCK_D):
            column = left + tl.arange(0, BLOCK_D)
            exists = column < D
            w_at = W + head * w_head + inner[:, None] * w_row + column[None, :] * w_col
            y = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            for k in range(0, d, BLOCK_K):
                w = tl.load(w_at + k * w_row, mask=(inner[:, None] < d - k) & exists[None, :], other=0.0)
                if d > BLOCK_K:
                    x = tl.load(x_at + k * v_col, mask=inside[:, None] & (inner[None, :] < d - k), other=0.0)
                if UPCAST:
                    x = x.to(tl.float32)
                    w = w.to(tl.float32)
                y = tl.dot(x, w, y, input_precision="ieee")
            if CENTRED:
                # Columns past D: 0 − 0.
                c = tl.load(C + (batch * kv_heads * group + head) * D + column, mask=exists, other=0.0)
                y -= c[None, :]
            total += tl.sum(tl.abs(y) if P == 1 else y * y, axis=1)
        if P == 2:
            if CENTRED:
                away = tl.load(rest + batch * kv_heads * group + head)
                total += away * away
            total = tl.sqrt(total)
        mean += total
    tl.store(out + pid * n + start + local, mean / share, mask=inside)


def projected_norm(V: Tensor, W_O: Tensor, p: int, group: str, centre: Tensor | None) -> Tensor:
    """See :func:`kvprobe_kernels.projected_norm.projected_norm`; arguments are checked there.

    Memory above inputs and result: for p = 2 the factors, for p = 1 none (a float32 copy of a centre of another dtype).
    """
    rest = None
    if p == 2:
        W_O, centre, rest = narrow(W_O, centre)
        W_O = W_O.float().contiguous()
    (H, _, D), (K, n, d) = W_O.shape, V.shape[-3:]
    G = H // K
    share = G if group == "mean" else 1
    V4 = V.reshape(-1, K, n, d)
    norms = V.new_empty((*V.shape[:-3], H // share, n), dtype=torch.float32)
    C, rest = (norms if extra is None else extra.float().contiguous() for extra in (centre, rest))
    constants, options = _config(V.dtype, W_O.dtype, d, _is_hopper_or_later(V.device))
    grid = (V4.shape[0] * (H // share), triton.cdiv(n, constants["BLOCK_N"]))
    with torch.cuda.device_of(V):
        projected_norm_kernel[grid](
            V4, W_O, C, rest, norms, n, D, K, G, share, *V4.stride(), *W_O.stride(),
            P=p, CENTRED=centre is not None, d=d, **constants, **options,
        )  # fmt: skip
    return norms


def _config(V: torch.dtype, W: torch.dtype, d: int, recent: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """Tile sizes and launch options.

    Chosen from what the compiler reports (no spills, two programs or more a multiprocessor), not from timings.
    """
    # Tensor cores multiply 16-bit numbers exactly and add in float32. Everything else is float32 and IEEE. The
    # interpreter computes on the raw bits of a bfloat16, so there too.
    interpreted = isinstance(projected_norm_kernel, InterpretedFunction)
    upcast = V != W or V.itemsize != 2 or interpreted
    narrowest = max(16, triton.next_power_of_2(d))
    if interpreted:
        # It pays by the operation, not by the element.
        tile, options = (64, 128, min(64, narrowest)), {}
    elif upcast:
        # Unbounded, the assembler aims at more programs than fit without spilling.
        tile, options = (64, 32, min(16, narrowest)), {"num_warps": 4, "num_stages": 2, "maxnreg": 168}
    elif d > 128:
        tile, options = (128, 128, 64), {"num_warps": 8, "num_stages": 2}
    elif recent:
        tile, options = (128, 128, narrowest), {"num_warps": 8, "num_stages": 2}
    else:
        tile, options = (128, 64, narrowest), {"num_warps": 4, "num_stages": 3}
    return {"UPCAST": upcast} | dict(zip(("BLOCK_N", "BLOCK_D", "BLOCK_K"), tile, strict=True)), options


def _is_hopper_or_later(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


# What is launched in practice: types of V and W_O, d, p and whether there is a centre.
_AOT = [
    *(("bf16", "bf16", d, 1, False) for d in (64, 80, 128, 256)),
    ("fp16", "fp16", 128, 1, True),
    ("bf16", "bf16", 128, 1, True),
    *(("fp32", "fp32", d, 1, False) for d in (64, 128)),
    ("fp32", "fp32", 80, 1, True),
    *(("fp32", "fp32", d, 2, d == 80) for d in (64, 80, 256)),
    ("bf16", "fp32", 128, 2, True),
]


def aot_cases() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """What is launched, to compile it without a GPU: name, kernel, signature, constants, launch options."""
    types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for V, W, d, p, centred in _AOT:
        for recent in (False, True) if V == W != "fp32" and d <= 128 else (False,):
            # W_O is a view of the weight [D, H·d], with unit stride along d, or of a copy, with unit stride along D.
            both = p == 1 and d == 128 and not centred
            for unit in ("w_row", "w_col") if both else ("w_row",) if p == 1 else ("w_col",):
                constants, options = _config(types[V], types[W], d, recent)
                # The launcher turns strides of 1 into constants.
                constants |= {"d": d, "P": p, "CENTRED": centred, "v_col": 1, unit: 1}
                name = f"p{p}-{V}-{W}-d{d}{'-centred' * centred}{'-hopper' * recent}-{unit}"
                yield name, projected_norm_kernel, _signature(constants, V, W), constants, options


def _signature(constants: dict[str, Any], V: str, W: str) -> dict[str, str]:
    pointers = {"V": f"*{V}", "W": f"*{W}", "C": "*fp32", "rest": "*fp32", "out": "*fp32"}
    names = projected_norm_kernel.arg_names
    return {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}

"""Two-stage selection in Triton: one program a row, which finds the exact cut by radix selection.

An fp32 number's bits, with the sign bit flipped (or all bits, if it is negative), order as unsigned integers as the
numbers do. Four passes over the row count the next eight bits of the keys that share the cut's leading bits so far, and
the fourth knows the cut exactly. A fifth finds the position of the last entry level with the cut that has a place. The
chosen set is then a test of (key, position) alone: stage 2 and the final pass evaluate stage 1 again instead of storing
it, and no intermediate of n entries is written.
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

# Four entries a thread: with eight, the histogram spills a predicate on sm_90 and sm_100.
_BLOCK, _WARPS = 1024, 8
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).min)


def two_stage_select(
    scores: Tensor,
    norms: Tensor | None,
    protected: Tensor | None,
    first: list[int],
    budgets: list[int],
    epsilon: float,
) -> Tensor:
    """Keep ``budgets[r]`` entries of row r, ``first[r]`` of them by score: as ``reference.two_stage_select``."""
    rows, n = scores.shape
    keep = torch.empty((rows, n), dtype=torch.bool, device=scores.device)
    if not n:
        return keep
    scores = scores.contiguous()
    # An absent tensor is never read, but its argument must be a pointer of the right type.
    norms_ = scores if norms is None else norms.contiguous()
    protected_ = keep if protected is None else protected.contiguous()
    counts = torch.tensor([budgets if norms is None else first, budgets], dtype=torch.int32, device=scores.device)
    _select[(rows,)](
        scores, norms_, protected_, keep, counts, rows, n, epsilon,
        TWO_STAGES=norms is not None, PROTECTED=protected is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return keep


def aot_cases() -> Iterator[tuple[str, Any, dict[str, str], dict[str, object], dict[str, int]]]:
    """Every configuration launched, to compile without a GPU: (name, kernel, types, constants, options)."""
    kinds = {"scores": "*fp32", "norms": "*fp32", "protected": "*i1", "keep": "*i1", "counts": "*i32"}
    kinds |= {"rows": "i32", "n": "i32", "epsilon": "fp32"}
    for stages in (False, True):
        for marked in (False, True):
            constants: dict[str, object] = {"TWO_STAGES": stages, "PROTECTED": marked, "BLOCK": _BLOCK}
            types = kinds | dict.fromkeys(constants, "constexpr")
            name = f"{'two-stage' if stages else 'top-k'}{'-protected' if marked else ''}"
            yield name, _select, types, constants, {"num_warps": _WARPS}


@triton.jit
def _image(value):
    # -0.0 equals 0.0 but has other bits.
    bits = tl.where(value == 0.0, 0.0, value).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def _score_key(scores, protected, at, inside, PROTECTED: tl.constexpr):
    """Key of stage 1. Key 0 is no number's image and means: no candidate; the largest key is a protected entry."""
    score = tl.load(scores + at, mask=inside, other=float("-inf"))
    key = tl.where(score == float("-inf"), 0, _image(score))
    if PROTECTED:
        marked = tl.load(protected + at, mask=inside, other=0)
        key = tl.where(marked != 0, 0xFFFFFFFF, key)
    return key.to(tl.uint32)


@triton.jit
def _product_key(scores, norms, at, inside, epsilon, taken):
    """Key of stage 2; ``taken`` entries are out of it."""
    score = tl.load(scores + at, mask=inside, other=float("-inf"))
    norm = tl.load(norms + at, mask=inside, other=0.0)
    out = taken | (score == float("-inf"))
    product = (tl.where(out, 0.0, score) + epsilon) * norm
    # A product that overflows downwards is still a candidate's.
    product = tl.where(product < _SMALLEST, _SMALLEST, product)
    return tl.where(out, 0, _image(product)).to(tl.uint32)


@triton.jit
def _key(
    scores, norms, protected, at, inside, epsilon, cut, last,
    STAGE: tl.constexpr, PROTECTED: tl.constexpr,
):  # fmt: skip
    key = _score_key(scores, protected, at, inside, PROTECTED)
    if STAGE == 2:
        key = _product_key(scores, norms, at, inside, epsilon, (key > cut) | ((key == cut) & (at <= last)))
    return key


@triton.jit
def _cut(
    scores, norms, protected, n, epsilon, places, cut_before, last_before,
    STAGE: tl.constexpr, PROTECTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The key at the cut, and the last position that is kept at it: kept are key > cut, or key == cut up to last."""
    bins = tl.arange(0, 512)
    prefix = tl.full((), 0, tl.uint32)
    for turn in tl.static_range(4):
        shift = 24 - 8 * turn
        counts = tl.zeros((512,), tl.int32)
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            key = _key(scores, norms, protected, at, at < n, epsilon, cut_before, last_before, STAGE, PROTECTED)
            same = at < n
            if turn > 0:
                same = same & ((key >> (shift + 8)) == prefix)
            # Bin 256 takes what does not count, since not every Triton's histogram has a mask.
            counts += tl.histogram(tl.where(same, ((key >> shift) & 0xFF).to(tl.int32), 256), 512)
        counts = tl.where(bins < 256, counts, 0)
        # The highest digit at which enough entries lie at or above it; digit 0 always is one.
        at_or_above = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        digit = tl.max(tl.where((at_or_above >= places) & (bins < 256), bins, 0), 0)
        places -= tl.sum(tl.where(bins > digit, counts, 0), 0)
        prefix = (prefix << 8) | digit.to(tl.uint32)
    last = tl.full((), -1, tl.int32)
    seen = tl.full((), 0, tl.int32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        key = _key(scores, norms, protected, at, at < n, epsilon, cut_before, last_before, STAGE, PROTECTED)
        level = ((key == prefix) & (at < n)).to(tl.int32)
        rank = seen + tl.cumsum(level, 0)
        last = tl.maximum(last, tl.max(tl.where((level == 1) & (rank <= places), at, -1), 0))
        seen += tl.sum(level, 0)
    return prefix, last


@triton.jit
def _select(
    scores, norms, protected, keep, counts, rows, n, epsilon,
    TWO_STAGES: tl.constexpr, PROTECTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its cuts, then its kept entries. ``counts``: entries after stage 1, then after stage 2, [2, rows]."""
    row = tl.program_id(0)
    offset = row.to(tl.int64) * n
    scores, norms, protected, keep = scores + offset, norms + offset, protected + offset, keep + offset
    first = tl.load(counts + row)
    cut, last = _cut(scores, norms, protected, n, epsilon, first, 0, -1, 1, PROTECTED, BLOCK)
    cut_2, last_2 = cut, last
    if TWO_STAGES:
        rest = tl.load(counts + rows + row) - first
        cut_2, last_2 = _cut(scores, norms, protected, n, epsilon, rest, cut, last, 2, PROTECTED, BLOCK)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        key = _key(scores, norms, protected, at, inside, epsilon, cut, last, 1, PROTECTED)
        kept = (key > cut) | ((key == cut) & (at <= last))
        if TWO_STAGES:
            key = _key(scores, norms, protected, at, inside, epsilon, cut, last, 2, PROTECTED)
            kept = kept | (key > cut_2) | ((key == cut_2) & (at <= last_2))
        tl.store(keep + at, kept, mask=inside)

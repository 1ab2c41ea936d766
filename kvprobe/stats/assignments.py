"""The target sets that the null makes equally likely: all of them, or a random draw, and the sums that they give."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from kvprobe.stats import checks
from kvprobe.stats.checks import Floats
from kvprobe.stats.design import Design, total

Chosen = list[NDArray[np.int64]]  # one array [assignments, m] an item: which of its spans are the target


def subsets(n: int, m: int) -> NDArray[np.int64]:
    """All subsets of size m of n spans, [C(n, m), m]."""
    return np.array(list(combinations(range(n), m)), dtype=np.int64)


def enumerated(design: Design, count: int) -> Chosen:
    """All `count` joint target sets."""
    chosen, stride = [], 1
    for x, m in zip(design.x, design.sizes, strict=True):
        table = subsets(len(x), m)
        chosen.append(table[np.arange(count) // stride % len(table)])
        stride *= len(table)
    return chosen


def drawn(design: Design, seed: int, draws: int) -> Chosen:
    """Random target sets: m of an item's spans, every subset equally likely."""
    rng, chosen = np.random.default_rng(seed), []
    for x, m in zip(design.x, design.sizes, strict=True):
        if m == 1:
            chosen.append(rng.integers(len(x), size=(draws, 1)))
            continue
        rows = max(1, checks.TABLE // len(x))
        keys = (rng.random((min(rows, draws - start), len(x))) for start in range(0, draws, rows))
        chosen.append(np.concatenate([k.argpartition(m - 1, axis=1)[:, :m] for k in keys]))
    return chosen


def totals(design: Design, chosen: Chosen, rows: slice) -> Floats:
    """sum_i sum_{t in S_i} x_t for these assignments: [rows, heads]."""
    return total(x[index[rows]].sum(axis=1) for x, index in zip(design.x, chosen, strict=True))

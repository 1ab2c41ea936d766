"""Timing as ratios: everything that is compared runs in one process, in turn, so that a machine's moods cancel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def once(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def in_turn(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median of first / second pair by pair; one warm-up of each."""
    first(), second()
    pairs = [(once(first), once(second)) for _ in range(rounds)]
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    return a, b, statistics.median(x / y for x, y in pairs)


def gemm_flops_per_s(size: int = 2048, rounds: int = 5) -> float:
    """The machine's fp32 rate: the best of a few size³ products."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    a @ b
    return 2 * size**3 / min(once(lambda: a @ b) for _ in range(rounds))

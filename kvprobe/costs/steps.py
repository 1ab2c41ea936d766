"""Bytes and FLOPs of every step of a job, and the limits under which it fits.

A job: prefill n tokens once, observe some rows, run arms of a few rows each over the shared prefix. Its peak is

    base + cache + holes + max(prefill, looking at one layer, one batch of arms + results of all batches)

where base is what the process holds before (weights included), holes what the C library's heap keeps on a CPU, and each
term is a :class:`Step`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from kvprobe.attention import CHUNK_BYTES
from kvprobe.costs.dry import Pass, run_dry
from kvprobe.costs.inside import Setting
from kvprobe.sizes import UNLIMITED, Limits

SHRINKS = {
    "allocator": (("chunk", 128), ("logits_bytes", 1 << 20)),
    "prefill": (("chunk", 128), ("logits_bytes", 1 << 20)),
    "arms": (("batch", 1), ("logits_bytes", 1 << 20)),
}
"""Step → the limits that make it smaller, and the smallest that is worth a pass."""

LOOKED_AT = 10
"""fp32 copies of one layer's logits rows at once: logits, weights, and what span statistics make of them in float64."""


@dataclass(frozen=True)
class Job:
    """What is asked: tokens of the prompt, observed rows, arms and the rows that each of them runs.

    ``prefilled`` says that the context is there already; ``traced`` that arms keep their rows and own keys;
    ``kept_rows`` is the number of rows whose logits are made, 0 for all; ``batch`` the arms a pass where memory does
    not matter.
    """

    n: int
    queries: int = 1
    arms: int = 0
    rows: int = 1
    prefilled: bool = False
    traced: bool = True
    kept_rows: int = 0
    batch: int = 1

    @property
    def context(self) -> int:
        """Tokens of the prefix that arms share."""
        return max(self.n - self.rows, 0) if self.arms else self.n


@dataclass(frozen=True)
class Step:
    """One step: bytes that it holds (``held``: until the end), FLOPs, and how often it runs."""

    name: str
    n_bytes: int
    flops: int = 0
    held: bool = False
    passes: int = 1


@dataclass(frozen=True)
class Costs:
    """What one model costs: a hollow twin, and passes already run dry.

    Attributes
    ----------
    twin
        From :func:`kvprobe.costs.dry.hollow` or :func:`kvprobe.costs.dry.from_config`.
    device
        Where the model will run.
    """

    twin: Any
    device: torch.device

    @cached_property
    def run(self) -> Callable[[Setting, int], Pass]:
        """(setting, rows of logits, 0 for all) → :class:`Pass`, each worked out once."""
        return lru_cache(maxsize=64)(lambda setting, keep: run_dry(self.twin, setting, keep))

    @cached_property
    def weights(self) -> int:
        """Bytes of all parameters and buffers, each storage once."""
        tensors = [*self.twin.parameters(), *self.twin.buffers()]
        return sum({id(each): each.numel() * each.element_size() for each in tensors}.values())

    def limit(self, limits: Limits) -> int:
        """Bytes of attention logits held at once."""
        return limits.logits_bytes or CHUNK_BYTES.get(self.device.type, CHUNK_BYTES["default"])

    def steps(self, job: Job, limits: Limits) -> list[Step]:
        """All steps of a job after the model is loaded, in order."""
        found = [] if job.prefilled else self._prefill(job, limits)
        if job.queries:
            found += self._observed(job)
        return found + (self._arms(job, limits) if job.arms else [])

    def _prefill(self, job: Job, limits: Limits) -> list[Step]:
        chunk = min(limits.chunk or job.n, job.n)
        one = self.run(Setting(1, chunk, 0, job.n, self.limit(limits)), 1)
        passes = -(-job.n // chunk)
        cache = one.kv_bytes * job.n // chunk
        flops = one.flops * job.n // chunk + _pairs_flops(one, job.n, 0)
        # The C library serves blocks under 32 MiB from its heap, and what falls between them stays: up to a second
        # working set was seen, by luck of the order in which two threads free theirs.
        holes = [Step("allocator", one.work_bytes, held=True)] if self.device.type == "cpu" else []
        return [
            Step("KV cache", cache, held=True),
            *holes,
            Step("prefill", one.work_bytes, flops, passes=passes),
        ]

    def _observed(self, job: Job) -> list[Step]:
        one = self.run(Setting(1, 1, 0, 1, self.limit(UNLIMITED)), 1)
        heads = max(h for h, *_ in one.heads)
        return [
            Step("observed rows", one.query_bytes * job.queries, held=True),
            Step("one layer of them", LOOKED_AT * 4 * heads * job.queries * job.n, _rows_flops(one, job)),
        ]

    def _arms(self, job: Job, limits: Limits) -> list[Step]:
        size = min(limits.batch or job.batch, job.arms)
        one = self.run(Setting(size, job.rows, job.context, job.rows, self.limit(limits), masked=True), job.kept_rows)
        traced = one.kv_bytes + one.query_bytes if job.traced else 0
        receipts = 8 * size * job.rows * sum(h for h, *_ in one.heads)  # the retained mass, as run and as returned
        passes = -(-job.arms // size)
        kept = (one.logits_bytes + traced + receipts) * job.arms // size
        before = kept - (one.logits_bytes + traced)  # results of all batches but the last
        work = before + one.work_bytes + one.kv_bytes + (one.query_bytes if job.traced else 0)
        flops = one.flops * job.arms // size + job.arms * _pairs_flops(one, job.n, job.context)
        return [
            Step("arms", work, flops, passes=passes),
            Step("results of arms", kept, held=True),
        ]


def totals(base: int, steps: list[Step]) -> list[int]:
    """What is held at each step: what was there before, and what the step holds itself."""
    found, held = [], base
    for step in steps:
        found.append(held + step.n_bytes)
        held += step.n_bytes if step.held else 0
    return found


def peak(base: int, steps: list[Step]) -> int:
    """The largest total at any step."""
    return max([base, *totals(base, steps)])


def fit(costs: Costs, job: Job, base: int, memory: int, given: Limits) -> tuple[Limits, list[Step]]:
    """The fastest limits under which the peak stays within ``memory``: whatever was given stays as it is.

    What shrinks is what belongs to the first step that does not fit: prefill passes, or the arms of a pass, and then
    the logits that attention holds at once. Where nothing can shrink, the caller sees a peak above ``memory``.
    """
    chunk, batch = given.chunk or job.n, given.batch or min(job.batch, max(job.arms, 1))
    limits = Limits(chunk, batch, costs.limit(given))
    while True:
        steps = costs.steps(job, limits)
        over = [step.name for step, total in zip(steps, totals(base, steps), strict=True) if total > memory]
        fixed = sum(step.n_bytes for step in steps if step.held and step.name not in SHRINKS)
        if base + fixed > memory:  # nothing helps: say how little it takes
            smaller = _smallest(limits, given)
        else:
            smaller = next((each for name in over if (each := _smaller(limits, given, name)) != limits), limits)
        if smaller == limits:
            return limits, steps
        limits = smaller


def _smallest(limits: Limits, given: Limits) -> Limits:
    """The smallest limits of all steps, as far as they are not given."""
    least = {name: smallest for shrinking in SHRINKS.values() for name, smallest in shrinking}
    return Limits(**{name: getattr(given, name) or min(getattr(limits, name), least[name]) for name in least})


def _smaller(limits: Limits, given: Limits, step: str) -> Limits:
    """Limits under which this step holds less; the same where there are none."""
    for name, smallest in SHRINKS.get(step, ()):
        value = getattr(limits, name)
        if getattr(given, name) is None and value > smallest:
            return replace(limits, **{name: max(smallest, 1 << ((value - 1).bit_length() - 1))})
    return limits


def _pairs_flops(one: Pass, n: int, start: int) -> int:
    """2 (d + d_v) FLOPs of each visible query–key pair and head: rows ``start`` … n − 1 over all earlier keys."""
    return sum(
        2 * h * (d + d_v) * _pairs(n, start, spec.window)
        for (h, _, d, d_v), spec in zip(one.heads, one.specs, strict=True)
    )


def _pairs(n: int, start: int, window: int | None) -> int:
    """Σ over rows of min(row + 1, window)."""
    if window is None or window >= n:
        return (n * (n + 1) - start * (start + 1)) // 2
    return _pairs(window, min(start, window), None) + window * (n - max(start, window))


def _rows_flops(one: Pass, job: Job) -> int:
    return sum(2 * h * d * job.queries * job.n for h, _, d, _ in one.heads)

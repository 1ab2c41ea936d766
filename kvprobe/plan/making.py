"""make(): a plan of a loaded model, or of one that is only described by its config."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvprobe import models, runs, sources
from kvprobe.costs import Costs, Job, Step, base_bytes, fit, from_config, peak
from kvprobe.errors import PlanError, quote
from kvprobe.inputs import count
from kvprobe.sizes import Limits, as_bytes, at_hand, written

SUFFIX = 40
"""Rows of an arm where none are given: a question and its answer."""

PROCESS_BYTES = 640 << 20
"""What Python, torch, transformers and TransformerLens hold without a model (measured on Linux, x86-64)."""


@dataclass(frozen=True)
class Plan:
    """What a job costs and under which limits it runs.

    Attributes
    ----------
    base_bytes
        Held before the job begins, weights included.
    weights_bytes
        Of all parameters and buffers.
    memory_bytes
        What may be held in all.
    steps
        Bytes and FLOPs of each step (:class:`kvprobe.costs.Step`).
    chosen
        Pass sizes: tokens of a prefill pass, arms of a pass, bytes of attention logits at once.
    """

    model: str
    dtype: str
    device: str
    job: Job
    base_bytes: int
    weights_bytes: int
    memory_bytes: int
    steps: tuple[Step, ...]
    chosen: Limits

    @property
    def peak_bytes(self) -> int:
        """The largest total at any step."""
        return peak(self.base_bytes, list(self.steps))

    @property
    def fits(self) -> bool:
        """Whether the peak stays within the memory."""
        return self.peak_bytes <= self.memory_bytes

    @property
    def limits(self) -> Limits:
        """What a run under this plan keeps to.

        Raises
        ------
        PlanError
            The plan does not fit.
        """
        if not self.fits:
            raise PlanError(
                f"{self.model}: {self.job.n} tokens and {self.job.arms} arms need {written(self.peak_bytes)} at "
                f"least, the plan has {written(self.memory_bytes)}; allowed: more memory, a shorter length, fewer "
                "arms or rows"
            )
        return self.chosen

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        facts = {name: getattr(self, name) for name in ("model", "dtype", "device", "fits", "peak_bytes")}
        facts |= {name: getattr(self, name) for name in ("memory_bytes", "base_bytes", "weights_bytes")}
        asked = {"length": self.job.n, "queries": self.job.queries, "arms": self.job.arms, "suffix": self.job.rows}
        steps = [asdict(step) for step in self.steps]
        return facts | asked | asdict(self.chosen) | {"flops": sum(step.flops for step in self.steps), "steps": steps}


def make(
    model: Any = "smollm2-135m",
    length: int = 8192,
    *,
    queries: int = 1,
    arms: int = 16,
    suffix: int | None = None,
    keep_trace: bool = True,
    memory: int | str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
    chunk: int | None = None,
    batch: int | None = None,
) -> Plan:
    """Plan a prefill of ``length`` tokens, ``queries`` observed rows, ``arms`` arms of ``suffix`` rows (default 40).

    Parameters
    ----------
    model
        A loaded model, or a name as for :func:`kvprobe.load`: then only its config is read, and ``dtype`` and
        ``device`` say how it would be loaded.
    keep_trace
        As for :func:`kvprobe.intervene`: whether arms keep their rows and own keys.
    memory
        ``"6GiB"`` or bytes that may be held in all; by default what the machine has at hand.
    chunk, batch
        Tokens of a prefill pass and arms of a pass, where they are not to be chosen.

    Raises
    ------
    PlanError, ModelError
        Bad input, a model that is not found, or one that cannot be run without numbers.
    """
    sizes = {"length": (length, 1), "queries": (queries, 0), "arms": (arms, 0)}
    n, rows, n_arms = (_count(name, value, least) for name, (value, least) in sizes.items())
    tail = min(SUFFIX, n) if suffix is None else _count("suffix", suffix, 1)
    if rows > n or tail > n:
        raise PlanError(f"queries={rows}, suffix={tail}; allowed: at most the length, {n}")
    given = Limits(*(None if value is None else _count(name, value, 1) for name, value in _passes(chunk, batch)))
    costs, label, base = _described(model, dtype, device)
    _context(costs.twin, label, n)
    size = runs.batch_size(tail, int(costs.twin.config.get_text_config().vocab_size))
    job = Job(n, rows, n_arms, tail, traced=bool(keep_trace), batch=size)
    room = at_hand(costs.device) if memory is None else as_bytes(memory)
    limits, steps = fit(costs, job, base, room, given)
    kind = str(next(iter(costs.twin.parameters())).dtype).removeprefix("torch.")
    return Plan(label, kind, str(costs.device), job, base, costs.weights, room, tuple(steps), limits)


def _passes(chunk: Any, batch: Any) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return ("chunk", chunk), ("batch", batch)


def _count(name: str, value: Any, least: int) -> int:
    if not hasattr(value, "__index__") or isinstance(value, bool) or value < least:
        raise PlanError(f"{name}={quote(value)} is not allowed: give a whole number of {least} or more")
    return count(name, value, least)


def _context(twin: Any, label: str, n: int) -> None:
    longest = sources.max_length(twin.config)
    if longest is not None and n > longest:
        raise PlanError(f"length={n} is beyond the {longest} positions that {label} has; allowed: at most that many")


def _described(model: Any, dtype: Any, device: str) -> tuple[Costs, str, int]:
    """Costs, name, and what is held before a job begins."""
    if hasattr(model, "twin"):
        return model.costs, model.name, base_bytes(model.device)
    config, label = sources.describe(model)
    where = _device(device)
    twin = from_config(config, _dtype(dtype, config))
    models.refuse_attention(twin, label)
    costs = Costs(twin, where)
    return costs, label, costs.weights + (PROCESS_BYTES if where.type == "cpu" else 0)


def _device(device: str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"device={quote(device)} is not a device; allowed: cpu, cuda, cuda:1, mps") from error


def _dtype(dtype: Any, config: Any) -> torch.dtype:
    found = getattr(torch, str(dtype), None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if dtype is None or dtype == "auto":
        found = getattr(config, "dtype", None) or torch.float32
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise PlanError(f"dtype={quote(dtype)} is not a floating-point dtype; allowed: float32, bfloat16, float16")
    return found

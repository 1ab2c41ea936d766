"""The limits of a run that was given no plan: none where it obviously fits, else those of its own plan."""

from __future__ import annotations

from typing import Any

from kvprobe.costs.steps import Job, fit, peak
from kvprobe.errors import PlanError
from kvprobe.sizes import UNLIMITED, Limits, at_hand, held, written

SAFE = 0.9
"""Share of the memory at hand that a run without a plan may fill."""


def limits_for(model: Any, job: Job, given: Limits = UNLIMITED) -> Limits:
    """Limits under which a job fits the memory at hand, as far as none were given.

    Raises
    ------
    PlanError
        It fits under none.
    """
    memory = int(SAFE * at_hand(model.device))
    base = base_bytes(model.device)
    if base + rough_bytes(model.twin, job) <= memory:
        return given
    limits, steps = fit(model.costs, job, base, memory, given)
    needed = peak(base, steps)
    if needed > memory:
        raise PlanError(
            f"{model.name}: {job.n} tokens and {job.arms} arms need {written(needed)} at least, {written(memory)} are "
            "at hand; allowed: a shorter prompt, fewer arms or rows, keep_trace=False, or a plan of your own "
            "(plan=kp.plan.make(model, length=…, memory=…))"
        )
    return limits


def base_bytes(device: Any) -> int:
    """What is held before the job begins: this process, or what torch has allocated on its CUDA device."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.memory_allocated(device))
    return held()


def rough_bytes(twin: Any, job: Job) -> int:
    """More than a job can need, from the sizes of the weights alone: whether to plan at all costs no dry run.

    A token holds at most 48 rows as wide as the widest weight matrix at once, and in each layer less of a cache than
    four rows of the model's width.
    """
    config = twin.config.get_text_config()
    parameters = [each for each in twin.parameters() if each.dim() > 1]
    inside = [max(each.shape[-2:]) for each in parameters if max(each.shape) < config.vocab_size]
    item = parameters[0].element_size()
    cached = 4 * int(config.num_hidden_layers) * int(config.hidden_size) * item
    run = job.arms * job.rows
    tokens = (0 if job.prefilled else job.n) + run
    rows = 16 * job.queries * (cached + 4 * job.n * int(config.num_attention_heads))
    return tokens * (48 * max(inside, default=0) * item + cached) + 8 * run * int(config.vocab_size) + rows

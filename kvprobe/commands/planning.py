"""``kvprobe plan``: a plan as tables for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprobe.commands.console import console, plural, table_of
from kvprobe.sizes import written

if TYPE_CHECKING:
    from kvprobe.plan import Plan

PREFIXES = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))


def print_plan(plan: Plan) -> None:
    """Steps, chosen pass sizes, and the peak beside the memory."""
    job, screen = plan.job, console()
    table = table_of(
        f"{plan.model} ({plan.dtype}, {plan.device}): {job.n} tokens, {plural(job.queries, 'observed row')}, "
        f"{plural(job.arms, 'arm')} of {plural(job.rows, 'row')}",
        ("step", "holds", "how long", "passes", "computes"),
    )
    base = plan.base_bytes - plan.weights_bytes
    if base > 0:
        table.add_row("process and libraries", written(base), "all along", "", "")
    table.add_row("weights", written(plan.weights_bytes), "all along", "", "")
    for step in plan.steps:
        passes = str(step.passes) if step.flops and step.passes > 1 else ""
        table.add_row(
            step.name, written(step.n_bytes), "from then on" if step.held else "meanwhile", passes, _flops(step.flops)
        )
    screen.print(table)
    chosen = plan.chosen
    screen.print(
        f"a prefill pass takes {chosen.chunk} tokens, a pass of arms {chosen.batch}, attention holds "
        f"{written(chosen.logits_bytes or 0)} of logits at once"
    )
    verdict = "fits" if plan.fits else "does NOT fit"
    screen.print(f"peak {written(plan.peak_bytes)}: {verdict} into {written(plan.memory_bytes)}")


def _flops(n: int) -> str:
    for size, name in PREFIXES:
        if n >= size:
            return f"{n / size:.3g} {name}"
    return f"{n} FLOP" if n else ""

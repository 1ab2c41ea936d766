"""A plan against what a process really holds: 8,192 tokens, one observed row, sixteen masks of forty rows."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

import kvprobe as kp

LONG, ROWS = 8192, 40
MASKS = [kp.KVMask(keys=(start, start + 20)) for start in range(100, 1700, 100)]


def run() -> tuple[dict[str, float], dict[str, float]]:
    """``plan_over_peak``, free and under a memory that asks for pieces, each in a process of its own (Linux)."""
    free = _child("0")
    pieces = _child(str(free["plan_mib"] - 10))
    assert pieces["chunk"] < free["chunk"] == LONG, "the smaller memory asked for no pieces"
    ratios = {"plan_over_peak": free["plan_mib"] / free["peak_mib"]}
    ratios["plan_over_peak_pieces"] = pieces["plan_mib"] / pieces["peak_mib"]
    named = {f"plan_{name}": value for name, value in free.items()}
    return ratios, named | {f"plan_pieces_{name}": value for name, value in pieces.items()}


def _child(memory_mib: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, memory_mib], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _measure(memory_mib: float) -> dict[str, float]:
    model = kp.load()
    ids = torch.randint(3, model.geometry.vocab, (LONG,), generator=torch.Generator().manual_seed(0))
    kp.observe(model, kp.Prompt.from_ids(ids[:64]))  # what a first pass loads once
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    memory = int(memory_mib * 2**20) or None
    plan = kp.plan.make(model, length=LONG, arms=len(MASKS), suffix=ROWS, memory=memory)
    begun = time.perf_counter()
    trace = kp.observe(model, kp.Prompt.from_ids(ids), plan=plan)
    observed = time.perf_counter()
    shared = trace.prefix(LONG - ROWS)
    outs = kp.intervene(model, kp.Prompt.from_ids(ids), MASKS, suffix=ROWS, prefix=shared, plan=plan)
    done = time.perf_counter()
    assert all(out.receipt.masked_weight == 0 for out in outs)
    status = Path("/proc/self/status").read_text()
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) / 1024
    seconds = {"observe_s": observed - begun, "masks_s": done - observed}
    return {"chunk": plan.chosen.chunk or LONG, "plan_mib": plan.peak_bytes / 2**20, "peak_mib": peak} | seconds


if __name__ == "__main__":
    print(json.dumps(_measure(float(sys.argv[1]))))

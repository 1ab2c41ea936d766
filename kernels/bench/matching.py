"""How strong a blow every candidate is: θ of all windows of an item and exact L of 64 of them, beside one prefill."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
from timing import once

import kvprobe as kp
from kvprobe import engine
from kvprobe.placebo import strength
from kvprobe.placebo.scope import Scope

NEAREST, TOLERANCE = 64, 1e-5


def run(model: Any, length: int = 1500, rounds: int = 5) -> tuple[dict[str, float], dict[str, float]]:
    """Correctness gate against float64 sums of each window, then the ratio."""
    item = kp.tasks.make("niah_multikey_1", model, length=length, seed=0, needles=9)
    prompt = item.prompt.extended(item.answer_ids)
    trace = kp.observe(model, prompt, list(range(item.context_stop, len(prompt))))
    (target,) = item.spans["evidence"]

    def scan() -> tuple[Any, Any, Any]:
        scope = Scope(trace)  # what one target's search shares, as kp.placebo.match does
        windows = strength.scan(scope, target[1] - target[0])
        own = windows.bound[target[0]]
        distance = np.abs(np.log(windows.bound[4 : item.context_stop - windows.length] / own))
        starts = 4 + np.argsort(distance, kind="stable")[:NEAREST]
        spans = [(int(start), int(start) + windows.length) for start in starts]
        return windows, spans, strength.measure(scope, [(span,) for span in spans], ["perturbation"])

    error = _error(trace, *scan())
    assert error <= TOLERANCE, f"matching: strengths differ from float64 sums by {error:.2g}, allowed {TOLERANCE}"
    seconds: dict[str, list[float]] = {"prefill": [], "scan": []}
    for _ in range(rounds):
        seconds["prefill"].append(once(lambda: engine.prefill(model.twin, prompt.ids)))
        seconds["scan"].append(once(scan))
    ratio = statistics.median(a / b for a, b in zip(seconds["scan"], seconds["prefill"], strict=True))
    measured = {f"matching_{name}_s": statistics.median(values) for name, values in seconds.items()}
    return {"matching_over_prefill": ratio}, measured | {"matching_max_rel_diff": error}


def _error(trace: Any, windows: Any, spans: Any, exact: Any) -> float:
    """Largest relative difference to the sums of :mod:`kvprobe.spans`, over the first three windows."""
    few = spans[:3]
    rows = len(trace.queries)
    bound = kp.span_stats(trace, few, centred=False).groupby("start")["bound"].sum() / rows
    layers = kp.spans.layer_perturbation(trace, few).groupby("start")["perturbation"].sum() / rows
    pairs = [(windows.bound[start], bound.loc[start]) for start, _ in few]
    pairs += [(exact["perturbation"][i], layers.loc[start]) for i, (start, _) in enumerate(few)]
    return max(abs(float(mine) / float(slow) - 1) for mine, slow in pairs)


if __name__ == "__main__":
    print(run(kp.load()))

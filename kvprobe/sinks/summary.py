"""From probed inputs to numbers: means over inputs with their intervals. Everything here is exploratory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvprobe import stats
from kvprobe.sinks.averages import BOUNDS, POSITIVE, mean_of
from kvprobe.sinks.buckets import BUCKETS
from kvprobe.sinks.pooling import HEAD_MEASURES, MEASURES
from kvprobe.sinks.sweeping import epsilon_rows, secondary
from kvprobe.sinks.timelines import time_courses

if TYPE_CHECKING:
    from kvprobe.sinks.probe import Probed
    from kvprobe.sinks.settings import Settings

STATUS = "exploratory: no test was fixed before the run, and intervals are over inputs of this task and model alone"
BUCKET_MEASURES = (
    *("mass", "value_mass", "ratio", "share", "output", "relative_ratio", "mass_per_token", "value_mass_per_token"),
    "n_tokens",
)
WHOLE = ("share", "output")
"""Parts of one whole: of an input without the bucket they are 0, not unknown."""
POSITION_MEASURES = ("mass", "value_mass", "ratio", "norm", "relative_norm", "relative_ratio")
DEFINITIONS = {
    "mass": "of a key: s = mean attention A over the chosen rows that see it; of a bucket: sum of s over its keys",
    "value_mass": "(s + ε) m, summed over a bucket's keys; m = ‖V W_O‖_p, the key's value behind the output projection",
    "ratio": "ρ = Σ A m / Σ A over heads and layers, without ε: how much value comes with one unit of attention",
    "relative_ratio": "ρ with m in units of its head's median over visible keys, so that layers with large values do "
    "not decide it",
    "share": "of a bucket: mean over all chosen rows of the attention it gets, 0 in an input without it; shares "
    "of all buckets sum to 1",
    "output": "share with every key weighted by m: the most that the bucket adds to a head's output",
    "n": "of a bucket: inputs that have it; all of its numbers but share and output are means over these",
    "heads_sinky": "share of heads whose s of the first position exceeds the threshold. In a layer with a window s is "
    "a mean over the rows that see that position; where none does, it is 0",
    "layers": "first_mass: s of the first position, likewise; sinky: share of the layer's heads above the threshold",
    "first4": "the first four positions, BOS included where the tokenizer adds one",
    "secondary_sink": "keys that meet all four conditions of a secondary sink in some layer left in, but for those in "
    "first4 or evidence, which have a position first (secondary.n_tokens counts them, "
    "secondary.n_tokens_in_other_buckets says how many they are)",
    "recent": "question and answer tokens, behind the context, that are no secondary sinks",
    "other": "everything else: the context without first4, evidence and secondary sinks",
    "auroc": "P(an evidence token's value > a first4 token's) within one input, ties ½, mean over inputs",
}
NO_EVIDENCE = "documents have no evidence span"
NOT_SEEN = "the chosen rows of no input see tokens of both in the layers left in"


def summarise(probes: Sequence[Probed], settings: Settings) -> dict[str, Any]:
    """All numbers of a run as plain values (:data:`DEFINITIONS` says what each is)."""
    seed = settings.seed
    pooled = {name: _auroc(probes, "pooled", name, seed) for name in MEASURES}
    return {
        "status": STATUS,
        "definitions": DEFINITIONS,
        "accuracy": _accuracy(probes),
        "buckets": buckets(probes, seed),
        "first_position": _position(probes, 0, seed),
        "positions": positions(probes, seed),
        "auroc_ratio_first4_vs_evidence": pooled["ratio"],
        "auroc": pooled,
        "auroc_first_position": {name: _auroc(probes, "first_position", name, seed) for name in MEASURES},
        "auroc_heads": {name: _auroc(probes, "heads", name, seed) for name in HEAD_MEASURES},
        "epsilon": settings.epsilon,
        "epsilon_sweep": epsilon_rows(probes, seed),
        "heads_sinky": sinky(probes, settings),
        "layers": layers(probes, settings),
        "secondary": secondary(probes, seed),
        "learned_sink": learned(probes, seed),
        "after": changes(probes, settings),
        "courses": time_courses(probes, settings),
    }


def _accuracy(probes: Sequence[Probed]) -> float | None:
    scores = [probe.facts["score_clean"] for probe in probes if "score_clean" in probe.facts]
    return float(np.mean(scores)) if scores else None


def buckets(probes: Sequence[Probed], seed: int) -> dict[str, Any]:
    """Bucket → its means with ``ci`` and the number ``n`` of inputs that have it; None where none has.

    ``share`` and ``output`` are means over all inputs, 0 where one lacks the bucket: so shares sum to 1.
    """
    return {name: _bucket([probe.pooled.get(name) for probe in probes], seed) for name in BUCKETS}


def _bucket(found: Sequence[dict[str, float] | None], seed: int) -> dict[str, Any] | None:
    """Means of one bucket; None for an input that lacks it."""
    rows = [row for row in found if row is not None]
    if not rows:
        return None
    absent = [0.0] * (len(found) - len(rows))
    measured = {
        name: mean_of(
            [row[name] for row in rows] + (absent if name in WHOLE else []), seed, bounds=BOUNDS.get(name, POSITIVE)
        )
        for name in BUCKET_MEASURES
    }
    return (
        {name: row["mean"] for name, row in measured.items()}
        | {"ci": {name: [row["ci_low"], row["ci_high"]] for name, row in measured.items()}}
        | {"n": len(rows), "ratio_undefined": measured["ratio"]["excluded"]}
    )


def positions(probes: Sequence[Probed], seed: int) -> list[dict[str, Any]]:
    """One row a place of ``first4``, as many as some input has."""
    return [_position(probes, place, seed) for place in range(max(len(probe.positions) for probe in probes))]


def _position(probes: Sequence[Probed], place: int, seed: int) -> dict[str, Any]:
    """One of the first positions: mean over inputs of every measure."""
    rows = [probe.positions[place] for probe in probes if place < len(probe.positions)]
    ranges = dict.fromkeys(POSITION_MEASURES, POSITIVE) | {"mass": (0.0, 1.0)}
    measured = {name: mean_of([row[name] for row in rows], seed, bounds=ranges[name]) for name in POSITION_MEASURES}
    return (
        {"place": place}
        | {name: row["mean"] for name, row in measured.items()}
        | {"ci": {name: [row["ci_low"], row["ci_high"]] for name, row in measured.items()}, "n": len(rows)}
    )


def _auroc(probes: Sequence[Probed], where: str, name: str, seed: int) -> dict[str, Any]:
    found = mean_of([probe.auroc[where][name] for probe in probes], seed, stats.auroc_interval)
    why = {} if found["n"] else {"why": NOT_SEEN if any("evidence" in p.pooled for p in probes) else NO_EVIDENCE}
    return found | {"higher": "evidence"} | why


def sinky(probes: Sequence[Probed], settings: Settings) -> dict[str, Any]:
    """Share of heads whose mass on the first position exceeds the threshold; intervals over inputs, not heads."""
    tables = [probe.sinks[~probe.sinks["layer"].isin(settings.exclude_layers)] for probe in probes]
    found = mean_of([float(table["sinky"].mean()) for table in tables], settings.seed, stats.auroc_interval)
    mean = found.pop("mean")
    return {"share": mean} | found | {"threshold": settings.threshold, "n_heads": len(tables[0])}


def layers(probes: Sequence[Probed], settings: Settings) -> dict[str, Any]:
    """Layer by layer, means over inputs and heads: first position, first4 and evidence. Excluded layers stand in it."""
    sinks = pd.concat([probe.sinks for probe in probes]).groupby("layer")
    found: dict[str, Any] = {
        "layer": sorted(pd.unique(probes[0].sinks["layer"]).tolist()),
        "first_mass": sinks["first"].mean().tolist(),
        "sinky": sinks["sinky"].mean().tolist(),
    }
    table = pd.concat([probe.buckets for probe in probes])
    for name in ("first4", "evidence"):
        rows = table[table["bucket"] == name].groupby("layer")
        sums = rows[["share", "output"]].mean()
        found[name] = (
            {"share": sums["share"].tolist(), "ratio": _over(sums["output"], sums["share"])} if len(sums) else None
        )
    return found | {"excluded": list(settings.exclude_layers)}


def _over(above: pd.Series[float], below: pd.Series[float]) -> list[float | None]:
    return [a / b if b > 0 else None for a, b in zip(above, below, strict=True)]


def learned(probes: Sequence[Probed], seed: int) -> dict[str, Any] | None:
    """The learned sink's share of attention; None for a model without one."""
    shares = [probe.pooled.get("learned_sink", {"share": 0.0})["share"] for probe in probes]
    return mean_of(shares, seed, bounds=BOUNDS["share"]) if any(shares) else None


def changes(probes: Sequence[Probed], settings: Settings) -> dict[str, Any] | None:
    """Reading → bucket → what masking the evidence changes: share, output, and ρ before and after.

    Shares and outputs are 0 in an item without the bucket; ρ is a mean over the ``n_with`` items that have it.
    """
    tables = [probe.after for probe in probes if probe.after is not None]
    if not tables:
        return None
    kept = [table[~table["layer"].isin(settings.exclude_layers)] for table in tables]
    found: dict[str, Any] = {}
    for reading in dict.fromkeys(kept[0]["reading"]):
        found[reading] = {}
        for name in BUCKETS:
            rows = [table[(table["reading"] == reading) & (table["bucket"] == name)] for table in kept]
            if any(map(len, rows)):
                found[reading][name] = _change(rows, settings.seed)
    return {"arm": "evidence masked for question and answer rows", "readings": found, "n": len(tables)}


def _change(rows: Sequence[pd.DataFrame], seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {"n_with": sum(len(row) > 0 for row in rows)}
    for name in WHOLE:
        changes = [_mean(row[f"{name}_after"] - row[f"{name}_before"]) for row in rows]
        found[f"{name}_change"] = mean_of(changes, seed, bounds=BOUNDS[f"{name}_change"])
    for when in ("before", "after"):
        shares, outputs = ([_mean(row[f"{name}_{when}"]) for row in rows] for name in ("share", "output"))
        found[f"share_{when}"] = float(np.mean(shares))
        ratios = [output / share for output, share in zip(outputs, shares, strict=True) if share > 0]
        found[f"ratio_{when}"] = float(np.mean(ratios)) if ratios else None
    return found


def _mean(column: pd.Series[float]) -> float:
    """Mean over heads and layers; 0 of a bucket that the item does not have."""
    return float(column.mean()) if len(column) else 0.0

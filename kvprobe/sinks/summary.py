"""From probed inputs to numbers: means over inputs with their intervals. Everything here is exploratory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvprobe import stats
from kvprobe.sinks.averages import mean_of
from kvprobe.sinks.buckets import BUCKETS
from kvprobe.sinks.pooling import HEAD_MEASURES, MEASURES
from kvprobe.sinks.sweeping import epsilon_rows, secondary

if TYPE_CHECKING:
    from kvprobe.sinks.probe import Probed
    from kvprobe.sinks.settings import Settings

STATUS = "exploratory: no test was fixed before the run, and intervals are over inputs of this task and model alone"
BUCKET_MEASURES = (
    *("mass", "value_mass", "ratio", "share", "output", "relative_ratio", "mass_per_token", "value_mass_per_token"),
    "n_tokens",
)
POSITION_MEASURES = ("mass", "value_mass", "ratio", "norm", "relative_norm", "relative_ratio")
DEFINITIONS = {
    "mass": "of a key: s = mean attention A over the chosen rows that see it; of a bucket: sum of s over its keys",
    "value_mass": "(s + ε) m, summed over a bucket's keys; m = ‖V W_O‖_p, the key's value behind the output projection",
    "ratio": "ρ = Σ A m / Σ A over heads and layers, without ε: how much value comes with one unit of attention",
    "relative_ratio": "ρ with m in units of its head's median over visible keys, so that layers with large values do "
    "not decide it",
    "share": "of a bucket: mean over all chosen rows of the attention it gets; shares of all buckets sum to 1",
    "output": "share with every key weighted by m: the most that the bucket adds to a head's output",
    "first4": "the first four positions, BOS included where the tokenizer adds one",
    "secondary_sink": "keys behind them that meet all four conditions of a secondary sink in some layer",
    "recent": "question and answer tokens: behind the context",
    "other": "everything else: the context without first4, evidence and secondary sinks",
    "auroc": "P(an evidence token's value > a first4 token's) within one input, ties ½, mean over inputs",
}
NO_EVIDENCE = "documents have no evidence span"


def summarise(probes: Sequence[Probed], settings: Settings) -> dict[str, Any]:
    """All numbers of a run as plain values (:data:`DEFINITIONS` says what each is)."""
    seed = settings.seed
    pooled = {name: _auroc(probes, "pooled", name, seed) for name in MEASURES}
    return {
        "status": STATUS,
        "definitions": DEFINITIONS,
        "accuracy": _accuracy(probes),
        "buckets": buckets(probes, seed),
        "first_position": _positions(probes, 0, seed),
        "positions": [_positions(probes, place, seed) for place in range(len(probes[0].positions))],
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
    """Bucket → mean over the inputs that have it, ``ci`` of every measure, and their number; None where none has."""
    found: dict[str, Any] = {}
    for name in BUCKETS:
        rows = [probe.pooled[name] for probe in probes if name in probe.pooled]
        measured = {measure: mean_of([row[measure] for row in rows], seed) for measure in BUCKET_MEASURES}
        found[name] = (
            {measure: row["mean"] for measure, row in measured.items()}
            | {"ci": {measure: [row["ci_low"], row["ci_high"]] for measure, row in measured.items()}}
            | {"n": len(rows), "ratio_undefined": measured["ratio"]["excluded"]}
            if rows
            else None
        )
    return found


def _positions(probes: Sequence[Probed], place: int, seed: int) -> dict[str, Any]:
    """One of the first positions: mean over inputs of every measure."""
    rows = [probe.positions[place] for probe in probes if place < len(probe.positions)]
    measured = {name: mean_of([row[name] for row in rows], seed) for name in POSITION_MEASURES}
    return (
        {"place": place}
        | {name: row["mean"] for name, row in measured.items()}
        | {"ci": {name: [row["ci_low"], row["ci_high"]] for name, row in measured.items()}, "n": len(rows)}
    )


def _auroc(probes: Sequence[Probed], where: str, name: str, seed: int) -> dict[str, Any]:
    found = mean_of([probe.auroc[where][name] for probe in probes], seed, stats.auroc_interval)
    why = {} if found["n"] else {"why": NO_EVIDENCE}
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
    shares = [probe.pooled["learned_sink"]["share"] for probe in probes if "learned_sink" in probe.pooled]
    return mean_of(shares, seed) if shares else None


def changes(probes: Sequence[Probed], settings: Settings) -> dict[str, Any] | None:
    """Reading → bucket → what masking the evidence changes: share, output, and ρ before and after."""
    tables = [probe.after for probe in probes if probe.after is not None]
    if not tables:
        return None
    kept = [table[~table["layer"].isin(settings.exclude_layers)] for table in tables]
    found: dict[str, Any] = {}
    for reading in dict.fromkeys(kept[0]["reading"]):
        found[reading] = {}
        for name in BUCKETS:
            rows = [table[(table["reading"] == reading) & (table["bucket"] == name)] for table in kept]
            if rows := [row for row in rows if len(row)]:
                found[reading][name] = _change(rows, settings.seed)
    return {"arm": "evidence masked for question and answer rows", "readings": found, "n": len(tables)}


def _change(rows: Sequence[pd.DataFrame], seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("share", "output"):
        found[f"{name}_change"] = mean_of(
            [float((r[f"{name}_after"] - r[f"{name}_before"]).mean()) for r in rows], seed
        )
    for when in ("before", "after"):
        shares, outputs = ([float(r[f"{name}_{when}"].mean()) for r in rows] for name in ("share", "output"))
        found[f"share_{when}"] = float(np.mean(shares))
        ratios = [output / share for output, share in zip(outputs, shares, strict=True) if share > 0]
        found[f"ratio_{when}"] = float(np.mean(ratios)) if ratios else None
    return found


def time_courses(probes: Sequence[Probed], settings: Settings) -> dict[str, Any] | None:
    """Bucket → mass, value and ρ at every generated token: means over heads and layers, then over items.

    Items generate different numbers of tokens: ``n`` says how many items each token's means are over.
    """
    tables = [probe.courses for probe in probes if probe.courses is not None]
    if not tables:
        return None
    kept = [table[~table["layer"].isin(settings.exclude_layers)] for table in tables]
    means = pd.concat([course_means(table).assign(item=item) for item, table in enumerate(kept)])
    rows = means.groupby(["bucket", "token"])[["mass", "value", "ratio"]].mean()
    return {
        "n_items": len(tables),
        "n": means.groupby("token")["item"].nunique().tolist(),
        "buckets": {
            name: {column: rows.loc[name][column].tolist() for column in rows} for name in means["bucket"].unique()
        },
    }


def course_means(table: pd.DataFrame) -> pd.DataFrame:
    """One row a bucket × generated token: mean over heads and layers; ratio is of the two means."""
    means = table.groupby(["bucket", "token"], sort=False)[["mass", "value"]].mean().reset_index()
    return means.assign(ratio=(means["value"] / means["mass"]).where(means["mass"] > 0))

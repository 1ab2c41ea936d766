"""What ε and the label of secondary sinks come to over all inputs of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe import stats
from kvprobe.sinks.averages import POSITIVE, mean_of
from kvprobe.sinks.buckets import BUCKETS
from kvprobe.sinks.recovery import LABELS, NOTE

if TYPE_CHECKING:
    from kvprobe.sinks.probe import Probed

SPEARMAN = ("spearman_value_mass", "spearman_ratio_mass", "spearman_ratio_norm")
QUESTIONS = ("value_mass", "value_mass_per_token", "value_per_mass")


def epsilon_rows(probes: Sequence[Probed], seed: int) -> list[dict[str, Any]]:
    """One row an ε: value masses of the buckets, evidence − first4 with intervals, AUROC, and what ε does to ranks.

    ``verdict`` answers, for that ε: which of ``evidence`` and ``first4`` has more ``value_mass`` (sums over keys), more
    ``value_mass_per_token``, more ``value_per_mass`` (Σ (s + ε) m / Σ s: ρ at ε = 0, and no ρ any more where ε is not
    small beside s), and which tokens rank higher in value mass (``auroc``). ``open``: the interval over inputs holds
    zero (one half), or there is none. What is per token is None where no row of any input sees a key of the bucket.
    """
    return [_epsilon(probes, place, seed) for place in range(len(probes[0].epsilon))]


def _epsilon(probes: Sequence[Probed], place: int, seed: int) -> dict[str, Any]:
    rows = [probe.epsilon[place] for probe in probes]
    found: dict[str, Any] = {"epsilon": rows[0]["epsilon"]}
    for name in ("value_mass", "value_mass_per_token"):
        found[name] = {
            bucket: mean_of([_number(row[name][bucket]) for row in rows if bucket in row[name]], seed)["mean"]
            for bucket in BUCKETS
            if any(bucket in row[name] for row in rows)
        }
    for name in SPEARMAN:
        found[name] = mean_of([_number(row[name]) for row in rows], seed)["mean"]
    found["auroc"] = mean_of([_number(row["auroc"]) for row in rows], seed, stats.auroc_interval)
    found["difference"] = {name: mean_of(_differences(probes, place, name), seed) for name in QUESTIONS}
    verdict = {name: _side(row, 0.0) for name, row in found["difference"].items()}
    return found | {"verdict": verdict | {"auroc": _side(found["auroc"], 0.5)}}


def _differences(probes: Sequence[Probed], place: int, name: str) -> list[float]:
    """evidence − first4 of every input; NaN without evidence, and per token or mass where one of them is not seen."""
    found = []
    for probe in probes:
        pair = [_value(probe, place, name, bucket) for bucket in ("evidence", "first4")]
        found.append(pair[0] - pair[1])
    return found


def _value(probe: Probed, place: int, name: str, bucket: str) -> float:
    row = probe.epsilon[place]
    if bucket not in row["value_mass"]:
        return np.nan
    if name != "value_per_mass":
        return _number(row[name][bucket])
    mass = probe.pooled[bucket]["mass"]
    return float(row["value_mass"][bucket] / mass) if mass > 0 else np.nan


def _side(row: dict[str, Any], middle: float) -> str | None:
    """Which side of the middle an interval of evidence − first4 lies on; None where nothing was compared."""
    if not row["n"]:
        return None
    if row["ci_low"] is None:
        return "open"
    return "evidence" if row["ci_low"] > middle else "first4" if row["ci_high"] < middle else "open"


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def secondary(probes: Sequence[Probed], seed: int) -> dict[str, Any] | None:
    """How many tokens have the label and which, what each condition alone lets through, and how well scores recover it.

    Recovery is the mean over inputs of AUROCs that are means over the layers left in; inputs without the label are
    excluded. ``n_tokens_in_other_buckets`` are labelled tokens that belong to ``evidence`` (or ``first4``), which have
    a position before ``secondary_sink`` has it. ``layer_keys`` counts every layer, excluded ones too.
    """
    looked = [probe for probe in probes if probe.secondary is not None]
    given = [probe.secondary for probe in looked if probe.secondary is not None]
    if not given:
        return None
    counts = [float(each["counts"]["tokens"]) for each in given]
    placed = [probe.pooled.get("secondary_sink", {}).get("n_tokens", 0) for probe in looked]
    texts = Counter(text for each in given for text in each["texts"])
    recovered: dict[str, Any] = {}
    for label in LABELS:
        rows = [each["recovery"][label] for each in given]
        recovered[label] = {
            "auroc": {
                name: mean_of([_number(row["auroc"][name]) for row in rows], seed, stats.auroc_interval)
                for name in rows[0]["auroc"]
            },
            "n_positive": sum(row["n_positive"] for row in rows),
            "n_negative": sum(row["n_negative"] for row in rows),
        }
    by_layer = {
        name: np.sum([each["counts"]["by_layer"][name] for each in given], axis=0).tolist()
        for name in given[0]["counts"]["by_layer"]
    }
    return {
        "n_tokens": mean_of(counts, seed, bounds=POSITIVE),
        "n_tokens_in_other_buckets": float(np.mean(np.subtract(counts, placed))),
        "n_inputs_with": sum(each["counts"]["tokens"] > 0 for each in given),
        "n_inputs": len(given),
        "texts": [[text, count] for text, count in texts.most_common(12)],
        "layer_keys": by_layer,
        "recovery": recovered,
        "options": given[0]["options"],
        "note": NOTE,
    }

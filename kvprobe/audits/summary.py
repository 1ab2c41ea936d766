"""From cells to Table 9: averages over documents and layers, ratios of averages, violations, Assumption 3.4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvprobe import stats
from kvprobe.audits.assumption import assumption
from kvprobe.audits.tables import violations
from kvprobe.cells import Pair

if TYPE_CHECKING:
    from collections.abc import Sequence


def rows(
    heads: pd.DataFrame, layers: pd.DataFrame, pairs: Sequence[Pair], levels: Sequence[str], seed: int = 0
) -> list[dict[str, Any]]:
    """One row a preset × base × cache × level, as in the paper's Table 9.

    Parameters
    ----------
    heads, layers
        Audits by head and by layer of both policies of every pair.
    pairs
        ``base`` selects by attention alone, ``ours`` is Algorithm 1 on it.

    Returns
    -------
    list of dict
        ``actual``, ``centred_bound``, ``bound``, ``stage2_bound`` are averages under Algorithm 1; ``previous_bound``
        is the relaxed bound under attention-only selection. θ̂ and the relaxed bound leave heads with σ ≤ ½ out
        (``share_valid`` is that of the others); ``bound_same_heads`` is θ of the heads that are left. Ratios are of
        averages: ``ratio`` = stage2_bound / previous_bound, ``ratio_bound`` = bound_same_heads / previous_bound. Both
        compare two bounds of two sets. What the second stage does to one bound is ``ratio_selection`` = stage2_bound /
        base_stage2_bound; ``share_above_previous`` is the share of cells in which θ̂ is above the previous bound of the
        other set. ``violations`` are those of L ≤ θ_c ≤ θ ≤ θ̂ ≤ relaxed bound, each of one and the same set.
    """
    found = []
    for pair in pairs:
        base, ours = pair.policies
        for cache in sorted(set(heads["cache"])):
            per_head = {name: _of(heads, policy.name, cache) for name, policy in (("base", base), ("ours", ours))}
            per_layer = {name: _of(layers, policy.name, cache) for name, policy in (("base", base), ("ours", ours))}
            held = assumption(per_head["ours"], seed)
            for level in levels:
                tables = per_head if level == "head" else per_layer
                about = {"preset": pair.preset, "base": pair.base.name, "cache": cache, "level": level}
                found.append(about | _row(tables["base"], tables["ours"], seed) | {"assumption": held})
    return found


def _of(table: pd.DataFrame, policy: str, cache: float) -> pd.DataFrame:
    return table[(table["policy"] == policy) & (table["cache"] == cache)].reset_index(drop=True)


def _row(base: pd.DataFrame, ours: pd.DataFrame, seed: int) -> dict[str, Any]:
    """Averages over all cells; over those where θ̂ exists for θ̂, the relaxed bounds, and what is held against them."""
    theta = "bound_valid" if "bound_valid" in ours else "bound"
    both = ours["stage2_bound"].notna() & base["relaxed_bound"].notna()
    means = {name: float(ours[name].mean()) for name in ("actual", "centred_bound", "bound", "mass")}
    means |= {
        "stage2_bound": float(ours.loc[both, "stage2_bound"].mean()),
        "bound_same_heads": float(ours.loc[both, theta].mean()),
        "previous_bound": float(base.loc[both, "relaxed_bound"].mean()),
        "previous_bound_candidates": float(base.loc[both, "relaxed_candidates"].mean()),
        "base_actual": float(base["actual"].mean()),
        "base_bound": float(base["bound"].mean()),
        "base_centred_bound": float(base["centred_bound"].mean()),
        "base_stage2_bound": float(base.loc[both, "stage2_bound"].mean()),
    }
    ratios = {
        "ratio": _over(means["stage2_bound"], means["previous_bound"]),
        "ratio_bound": _over(means["bound_same_heads"], means["previous_bound"]),
        "ratio_selection": _over(means["stage2_bound"], means["base_stage2_bound"]),
        "ratio_candidates": _over(means["stage2_bound"], means["previous_bound_candidates"]),
    }
    for name in ("bound", "centred_bound"):
        interval = _ratio_over_documents(ours, name, "actual", seed)
        short = f"{name.removesuffix('_bound')}_over_actual"
        ratios |= {short: interval.mean, f"{short}_low": interval.low, f"{short}_high": interval.high}
    n_heads = ours["n_heads"].sum() if "n_heads" in ours else len(ours)
    valid = ours["valid_heads"].sum() if "valid_heads" in ours else both.sum()
    above = (ours.loc[both, "stage2_bound"] > base.loc[both, "relaxed_bound"]).mean() if both.any() else float("nan")
    return (
        means
        | ratios
        | {
            "violations": violations(base) + violations(ours),
            "n_cells": len(base) + len(ours),
            "share_valid": float(valid / n_heads),
            "share_above_previous": float(above),
            "n_docs": int(ours["doc"].nunique()),
        }
    )


def layer_rows(layers: pd.DataFrame, pairs: Sequence[Pair], seed: int = 0) -> pd.DataFrame:
    """What the centred bound buys, layer by layer: averages over documents under Algorithm 1.

    One row a preset × base × cache × layer: ``actual``, ``centred_bound``, ``bound``, and the ratios of their averages
    ``bound_over_actual``, ``centred_over_actual`` with 95 % intervals over documents, ``centred_over_bound``.
    """
    found = []
    for pair in pairs:
        mine = layers[layers["policy"] == pair.policies[1].name]
        for (cache, layer), group in mine.groupby(["cache", "layer"]):
            row: dict[str, Any] = {"preset": pair.preset, "base": pair.base.name, "cache": cache, "layer": layer}
            row |= {name: float(group[name].mean()) for name in ("actual", "centred_bound", "bound")}
            row["centred_over_bound"] = _over(row["centred_bound"], row["bound"])
            for name in ("bound", "centred_bound"):
                interval = _ratio_over_documents(group, name, "actual", seed)
                short = f"{name.removesuffix('_bound')}_over_actual"
                row |= {short: interval.mean, f"{short}_low": interval.low, f"{short}_high": interval.high}
            found.append(row | {"n_docs": int(group["doc"].nunique())})
    return pd.DataFrame(found)


def _ratio_over_documents(table: pd.DataFrame, top: str, bottom: str, seed: int) -> stats.Interval:
    """Ratio of two averages, with its interval over documents; no interval where nothing changes in some document."""
    means = table.groupby("doc", sort=False)[[top, bottom]].mean()
    if (means[bottom] <= 0).any():
        ratio, nan = _over(float(means[top].mean()), float(means[bottom].mean())), float("nan")
        return stats.Interval(ratio, nan, nan, len(means), "undefined: nothing changes in some document", None, True)
    return stats.ratio_interval(means[top].to_numpy(), means[bottom].to_numpy(), seed=seed)


def _over(top: float, bottom: float) -> float:
    return float(np.divide(top, bottom)) if bottom else float("nan")

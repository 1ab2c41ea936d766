"""Time courses of all items of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from kvprobe.sinks.probe import Probed
    from kvprobe.sinks.settings import Settings


def time_courses(probes: Sequence[Probed], settings: Settings) -> dict[str, Any] | None:
    """Bucket → mass, value and ρ at every generated token: means over heads and layers, then over items.

    Items generate different numbers of tokens: ``n`` says how many items each token's means are over. Of an item
    without the bucket mass and value are 0, so that masses sum to 1; ρ is a mean over the items that have one, None
    where none has. ``n`` of a bucket: items that have it, by token.
    """
    tables = [probe.courses for probe in probes if probe.courses is not None]
    if not tables:
        return None
    kept = [table[~table["layer"].isin(settings.exclude_layers)] for table in tables]
    means = pd.concat([course_means(table).assign(item=item) for item, table in enumerate(kept)])
    n = means.groupby("token")["item"].nunique()
    buckets = means.groupby("bucket", sort=False)
    courses = {str(name): _course(rows, n) for name, rows in buckets}
    return {"n_items": len(tables), "n": n.tolist(), "buckets": courses}


def _course(rows: pd.DataFrame, n: pd.Series[int]) -> dict[str, list[Any]]:
    """One bucket at every token; ``rows`` are of the items that have it, ``n`` counts all items that get there."""
    by_token = rows.groupby("token")
    sums, ratio = by_token[["mass", "value"]].sum().reindex(n.index, fill_value=0.0), by_token["ratio"].mean()
    return {
        **{name: (sums[name] / n).tolist() for name in ("mass", "value")},
        "ratio": [None if pd.isna(value) else float(value) for value in ratio.reindex(n.index)],
        "n": by_token["item"].nunique().reindex(n.index, fill_value=0).tolist(),
    }


def course_means(table: pd.DataFrame) -> pd.DataFrame:
    """One row a bucket × generated token: mean over heads and layers; ratio is of the two means.

    A bucket that some layers alone have (a learned sink) counts as 0 in the others.
    """
    cells = len(table[["layer", "head"]].drop_duplicates())
    means = (table.groupby(["bucket", "token"], sort=False)[["mass", "value"]].sum() / cells).reset_index()
    return means.assign(ratio=(means["value"] / means["mass"]).where(means["mass"] > 0))

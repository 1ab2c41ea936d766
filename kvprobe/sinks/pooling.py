"""From scores to numbers of one input: buckets as shares of attention, the first positions, AUROC within the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe import stats
from kvprobe.sinks.buckets import Buckets
from kvprobe.sinks.scores import Scores
from kvprobe.sinks.streaming import Array

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("mass", "value_mass", "norm", "relative_norm", "ratio", "relative_ratio")
"""Pooled over heads and layers, of every key; norm and relative_norm are m alone, as a control of the two ratios."""
HEAD_MEASURES = ("mass", "value_mass", "norm")
"""Within one head; its ratio is its norm."""


def of_layers(scores: Scores, layers: Sequence[int]) -> Scores:
    """The scores of some layers alone."""
    parts = {name: getattr(scores, name)[list(layers)] for name in ("mass", "norms", "seen", "learned")}
    return replace(scores, **parts)


def spent(scores: Scores) -> Array:
    """Share of a chosen row's attention that each key gets, mean over *all* chosen rows, [L, H, n].

    s_j is a mean over the rows that see j alone, so that Σ_j s_j exceeds 1 where rows see different keys; these shares
    (and the learned sink's) sum to 1.
    """
    weight = scores.seen[:, None] / len(scores.queries)
    return np.where(scores.seen[:, None] > 0, scores.mass, 0.0) * weight


def by_bucket(scores: Scores, buckets: Buckets) -> pd.DataFrame:
    """One row a layer × head × bucket that holds a key.

    Returns
    -------
    DataFrame
        ``layer, head, bucket, share`` (Σ over keys of :func:`spent`), ``output`` (Σ share · m: the most that the bucket
        adds to the head's output, per row) and ``relative_output`` (m in units of its head's median). A learned sink
        has a share and no output.
    """
    import pandas as pd

    shares, relative = spent(scores), np.nan_to_num(scores.relative_norms())
    parts = []
    for name, keys in buckets.keys.items():
        if keys:
            at = list(keys)
            share = shares[..., at]
            sums = {
                "share": share,
                "output": share * scores.norms[..., at],
                "relative_output": share * relative[..., at],
            }
            parts.append(_frame(name, {column: values.sum(-1) for column, values in sums.items()}))
    if (scores.learned > 0).any():
        nothing = np.zeros_like(scores.learned)
        parts.append(_frame("learned_sink", {"share": scores.learned, "output": nothing, "relative_output": nothing}))
    return pd.concat(parts, ignore_index=True)


def _frame(name: str, columns: dict[str, Array]) -> pd.DataFrame:
    import pandas as pd

    layer, head = (grid.reshape(-1) for grid in np.indices(columns["share"].shape))
    return pd.DataFrame(
        {"layer": layer, "head": head, "bucket": name} | {key: values.reshape(-1) for key, values in columns.items()}
    )


def pooled_buckets(table: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Bucket → its numbers over the heads and layers of ``table`` (a bucket table with the columns of `by_bucket`).

    ``mass``, ``value_mass`` and their values per token are means over heads, as is ``share``; ``ratio`` is
    Σ A m / Σ A over all of them, ``relative_ratio`` the same with m in units of its head's median. A layer whose window
    hides the bucket counts as 0, and not at all in what is per token. A layer without a learned sink counts as 0 in
    ``share`` and ``output``, so that shares sum to 1, and not at all in what else is said of learned sinks.
    """
    found = {}
    cells = len(table[["layer", "head"]].drop_duplicates())
    for name, rows in table.groupby("bucket"):
        total = float(rows["share"].sum())
        means = ("mass", "value_mass", "mass_per_token", "value_mass_per_token")
        shares = {column: float(rows[column].sum()) / cells for column in ("share", "output")}
        found[str(name)] = (
            {column: float(rows[column].mean()) for column in means}
            | shares
            | {
                "ratio": float(rows["output"].sum()) / total if total > 0 else np.nan,
                "relative_ratio": float(rows["relative_output"].sum()) / total if total > 0 else np.nan,
                "n_tokens": int(rows["n_tokens"].iloc[0]),
            }
        )
    return found


def measures(scores: Scores) -> dict[str, Array]:
    """Each of :data:`MEASURES` of every key, pooled over heads and layers, [n]; NaN where it is not defined."""
    return {
        "mass": scores.pooled("mass"),
        "value_mass": scores.pooled("value_mass"),
        "norm": scores.pooled("norm"),
        "relative_norm": scores.pooled("norm", relative=True),
        "ratio": scores.ratio("all"),
        "relative_ratio": scores.ratio("all", relative=True),
    }


def evidence_above_first4(
    scores: Scores, buckets: Buckets, measured: Mapping[str, Array]
) -> dict[str, dict[str, float]]:
    """AUROC, P(value of an evidence token > value of one of the first four), within one input.

    ``pooled``: of ``measured``, what :func:`measures` returns. ``heads``: within every head by itself, then the mean
    over heads. ``first_position``: as ``pooled``, against the first position alone (the others of ``first4`` may be
    tokens like any). NaN where a class is empty or nothing of it is seen.
    """
    evidence, first = (list(buckets.keys.get(name, ())) for name in ("evidence", "first4"))
    pooled = {name: _auroc(values, evidence, first) for name, values in measured.items()}
    tables = {"mass": scores.mass, "value_mass": scores.value_mass(), "norm": scores.norms}
    alone = {name: _auroc(values, evidence, first[:1]) for name, values in measured.items()}
    return {
        "pooled": pooled,
        "first_position": alone,
        "heads": {name: _heads(table, evidence, first) for name, table in tables.items()},
    }


def _auroc(values: Array, positive: list[int], negative: list[int]) -> float:
    more, less = (values[keys] for keys in (positive, negative))
    return stats.auroc(more[~np.isnan(more)], less[~np.isnan(less)])


def _heads(table: Array, positive: list[int], negative: list[int]) -> float:
    """Mean over heads that see all of both classes."""
    if not positive or not negative:
        return np.nan
    columns = table.reshape(-1, table.shape[-1]).T
    whole = ~np.isnan(columns[positive + negative]).any(0)
    if not whole.any():
        return np.nan
    return float(stats.auroc_many(columns[positive][:, whole], columns[negative][:, whole]).mean())


def first_positions(buckets: Buckets, measured: Mapping[str, Array]) -> list[dict[str, Any]]:
    """What :func:`measures` returns, of each key of ``first4``."""
    return [
        {"position": key, "place": key - buckets.pad} | {name: float(values[key]) for name, values in measured.items()}
        for key in buckets.keys.get("first4", ())
    ]

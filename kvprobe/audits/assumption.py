"""Assumption 3.4 of CriticalKV: the first stage holds more than half of the attention (σ > ½)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvprobe import stats
from kvprobe.cells import matrix

if TYPE_CHECKING:
    import pandas as pd

READINGS = {"selected": "sigma", "oracle": "sigma_oracle"}
"""Mass of the set that the policy selected, or of the best set of that size: the probe row's own top ⌊αb⌋."""


def assumption(heads: pd.DataFrame, seed: int = 0) -> dict[str, Any]:
    """Both readings of Assumption 3.4, from the cells (:func:`kvprobe.audit`, by head) of one policy and size.

    Returns
    -------
    dict
        ``share_selected``, ``share_oracle``: share of the heads with σ > ½, mean over documents, with ``…_low`` and
        ``…_high`` (95 % over documents; NaN where all documents have the same share); ``heads_selected``,
        ``heads_oracle``: share of the heads whose mean σ over documents is above ½; ``failing_heads``,
        ``failing_heads_oracle``: the others.
    """
    found: dict[str, Any] = {}
    for reading, column in READINGS.items():
        passes = heads.assign(passes=(heads[column] > 0.5).astype(float)).groupby("doc", sort=False)["passes"].mean()
        interval = stats.mean_interval(passes.to_numpy(), seed=seed, bounds=(0.0, 1.0))
        low, high = (float("nan"),) * 2 if interval.degenerate else (interval.low, interval.high)
        means = matrix(heads, column, ["layer", "head"]).mean(0)
        found |= {
            f"share_{reading}": interval.mean,
            f"share_{reading}_low": low,
            f"share_{reading}_high": high,
            f"heads_{reading}": float((means > 0.5).mean()),
        }
    return found | {
        "failing_heads": failing_heads(heads, "selected"),
        "failing_heads_oracle": failing_heads(heads, "oracle"),
    }


def failing_heads(heads: pd.DataFrame, reading: str = "selected") -> list[dict[str, Any]]:
    """Heads whose mean σ over documents is at most ½, with that mean and the share of documents where σ ≤ ½."""
    column = READINGS[reading]
    grouped = heads.assign(fails=(heads[column] <= 0.5).astype(float)).groupby(["layer", "head"])
    means = grouped[[column, "fails"]].mean().reset_index()
    worst = means[means[column] <= 0.5].rename(columns={column: "sigma", "fails": "share_of_docs"})
    listed: list[Any] = worst[["layer", "head", "sigma", "share_of_docs"]].to_dict("records")
    return listed

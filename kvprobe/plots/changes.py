"""How attention moves when a span is masked, read three ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.plots.style import GREY, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTE = """Over all keys that are left,
raw adds up to 1 − R: it rises
even where no head moved.
Among survivors adds up to 0."""

READINGS = {
    "raw": ("raw: A′ − A", "#E69F00", ""),
    "corrected": ("corrected: A′R − A", "#56B4E9", "////"),
    "conditional": ("among survivors: A′ − A/R", "#0072B2", ""),
}
BUCKETS = {"first4": "first 4 positions\n(attention sink)", "content": "rest of the context\nwithout the masked span"}


@styled
def attention_change(ax: Axes, change: Mapping[str, Mapping[str, float]]) -> None:
    """Bars: change of attention to what is left, when a span is masked, read three ways.

    A is the clean row, A′ the masked one (it sums to 1 again), R the share of weight that the mask left. *Raw* A′ − A
    compares rows of different length and adds up to 1 − R ≥ 0: a gain even where no logit moved. *Corrected* A′R − A
    is the change on the clean scale; *among survivors* A′ − A/R is the change of shares, which adds up to 0.

    Parameters
    ----------
    change
        Bucket → ``raw``, ``corrected``, ``conditional``: shares of attention, as in
        ``summary["ablation"]["evidence"]["delta_attention"]``.
    """
    middle = (len(READINGS) - 1) / 2
    for k, (reading, (name, colour, hatch)) in enumerate(READINGS.items()):
        values = 100 * np.array([change[bucket][reading] for bucket in change])
        at = np.arange(len(change)) + 0.27 * (k - middle)
        bars = ax.bar(at, values, 0.25, color=colour, hatch=hatch, edgecolor="black", linewidth=0.6, label=name)
        ax.bar_label(bars, [f"{value:+.2f}".replace("-", "−") for value in values], padding=2, fontsize=8)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xticks(range(len(change)), [BUCKETS.get(bucket, bucket) for bucket in change])
    ax.margins(y=0.15)
    ax.set_ylabel("change of attention (percentage points)")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.text(1.02, 0.0, NOTE, transform=ax.transAxes, fontsize=8, color=GREY)

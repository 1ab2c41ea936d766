"""What masking each class of spans does to the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import FuncFormatter

from kvprobe.plots.style import GREY, LOOKS, plural, signed, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

LINEAR = 0.01
"""Half-width, in nats, of the band around 0 that is drawn on a linear scale."""


@styled
def answer_by_arm(ax: Axes, arms: pd.DataFrame, effects: Mapping[str, Any] | None = None) -> None:
    """Change of the gold answer's log-probability by class of the masked span.

    One point a masked span, one line an item (through the mean of its spans), one diamond a class: the mean over items
    and its interval. The scale is logarithmic on both sides of a linear band of ± 0.01 nats: −20 and −0.01 both show.

    Parameters
    ----------
    arms
        One row an arm: ``item``, ``label``, ``delta_logprob``, ``spans``, ``score``; the clean arm is not drawn.
    effects
        Class → ``delta_logprob``, ``ci_low``, ``ci_high`` (NaN or None: no interval), as in ``summary["ablation"]``;
        None: the means of the table, without intervals.
    """
    present = [label for label in LOOKS if (arms["label"] == label).any()]
    means = arms.groupby(["item", "label"])["delta_logprob"].mean().unstack("label").reindex(columns=present)
    ax.axhspan(-LINEAR, LINEAR, color="#EBEBEB", zorder=0)
    ax.axhline(0, color="black", linewidth=0.8, zorder=1)
    places = dict(zip(means.index, _spread(len(means)), strict=True))
    line: dict[str, Any] = {"color": GREY, "linewidth": 0.7, "alpha": max(0.15, 0.7 - 0.02 * len(means)), "zorder": 2}
    for item, row in means.iterrows():
        at = np.flatnonzero(row.notna())
        ax.plot(at + places[item], row.iloc[at], **line)
    for x, label in enumerate(present):
        _points(ax, x, arms[arms["label"] == label], places)
        _mean(ax, x, *_effect(effects, label, means[label]))
    ax.set_xticks(range(len(present)), [_tick(arms[arms["label"] == label], label) for label in present])
    ax.set_xlim(-0.45, max(len(present), 1) - 0.2)
    _scale(ax)
    ax.set(xlabel="masked spans", ylabel="change of the gold answer's log-probability (nats)")


def _spread(n: int) -> np.ndarray[Any, Any]:
    """Offsets from −0.15 to 0.15: the golden ratio's multiples lie evenly whatever their number, and always alike."""
    return (np.arange(n) * 0.6180339887 % 1.0 - 0.5) * 0.3 if n > 1 else np.zeros(n)


def _points(ax: Axes, x: int, rows: pd.DataFrame, places: Mapping[Any, float]) -> None:
    """Spans side by side; the only one of an item sits on the item's line."""
    spread = rows["item"].map(places) if rows["item"].is_unique else _spread(len(rows))
    label = str(rows["label"].iloc[0])
    ax.plot(x + spread, rows["delta_logprob"], **LOOKS[label].marks(1.0, len(rows)), alpha=0.8, zorder=3, label=label)


def _effect(effects: Mapping[str, Any] | None, label: str, means: pd.Series[Any]) -> tuple[float, float, float]:
    """Mean, low and high; a None that JSON made of NaN is NaN again."""
    row = (effects or {}).get(label) or {"delta_logprob": means.mean()}
    mean, low, high = (np.nan if row.get(key) is None else row[key] for key in ("delta_logprob", "ci_low", "ci_high"))
    return float(mean), float(low), float(high)


def _mean(ax: Axes, x: int, mean: float, low: float, high: float) -> None:
    at = x + 0.25
    if np.isfinite([low, high]).all():
        ax.plot([at, at], [low, high], color="black", linewidth=1.4, zorder=4)
    ax.plot(at, mean, "D", color="black", markersize=5, zorder=5, label="mean")
    box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    digits = 1 if abs(mean) >= 1 else 3
    text = signed(mean, digits)
    if np.isfinite([low, high]).all():
        text += f"\n[{signed(low, digits)}, {signed(high, digits)}]"
    ax.annotate(text, (at, mean), (6, 0), textcoords="offset points", va="center", fontsize=8, bbox=box, zorder=4)


def _tick(rows: pd.DataFrame, label: str) -> str:
    sizes = [len(spans.split()) for spans in rows["spans"]]
    together = " (an item's at once)" if max(sizes) > 1 else ""
    number = f"n = {plural(rows['item'].nunique(), 'item')}, {plural(sum(sizes), 'span')}{together}"
    right = f"answer right in {rows.groupby('item')['score'].mean().mean():.0%}"
    return "\n".join([LOOKS[label].name, number, right])


def _scale(ax: Axes) -> None:
    low, high = ax.dataLim.intervaly  # of all that is drawn, intervals included
    ax.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
    ax.set_ylim(min(2 * low, -0.03), max(2.5 * high, 0.03))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}".replace("-", "−") if value else "0"))

"""What masking each class of spans does to the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.plots.style import GREY, LOOKS, plural, signed, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

LINEAR = 0.01
"""Half-width, in nats, of the band around 0 that is drawn on a linear scale."""


@styled
def answer_by_arm(ax: Axes, arms: pd.DataFrame, effects: Mapping[str, Any] | None = None) -> None:
    """Change of the gold answer's log-probability by class of the masked span.

    One point a masked span, one line an item (through the mean of its spans), one diamond a class: the mean over items and its
    interval. The scale is logarithmic on both sides of a linear band of ± 0.01 nats, so that −20 and −0.01 both show.

    Parameters
    ----------
    arms
        One row an arm: ``item``, ``label``, ``delta_logprob``, ``spans``, ``score``; the clean arm is not drawn.
    effects
        Class → ``delta_logprob``, ``ci_low``, ``ci_high`` (NaN or None: no interval), as in ``summary["ablation"]``; None:
        the means of the table, without intervals.
    """
    present = [label for label in LOOKS if (arms["label"] == label).any()]
    means = arms.groupby(["item", "label"])["delta_logprob"].mean().unstack("label").reindex(columns=present)
    ax.axhspan(-LINEAR, LINEAR, color="#EBEBEB", zorder=0)
    ax.axhline(0, color="black", linewidth=0.8, zorder=1)
    for _, row in means.iterrows():
        at = np.flatnonzero(row.notna())
        ax.plot(at, row.iloc[at], color=GREY, linewidth=0.7, alpha=0.7, zorder=2)
    for x, label in enumerate(present):
        _points(ax, x, arms.loc[arms["label"] == label, "delta_logprob"].to_numpy(), label)
        _mean(ax, x, *_effect(effects, label, means[label]))
    ax.set_xticks(range(len(present)), [_tick(arms[arms["label"] == label], label) for label in present])
    ax.set_xlim(-0.45, max(len(present), 1) - 0.25)
    _scale(ax, arms.loc[arms["label"].isin(present), "delta_logprob"].to_numpy())
    ax.set(xlabel="masked spans", ylabel="change of the gold answer's log-probability (nats)")


def _points(ax: Axes, x: int, values: np.ndarray[Any, Any], label: str) -> None:
    """Points side by side: the golden ratio's multiples spread any number of them evenly, and always alike."""
    spread = (np.arange(len(values)) * 0.6180339887 % 1.0 - 0.5) * 0.3 if len(values) > 1 else np.zeros(1)
    ax.plot(x + spread, values, **LOOKS[label].marks(), alpha=0.8, zorder=3, label=label)


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
    digits = 1 if abs(mean) >= 1 else 3
    text = signed(mean, digits)
    if np.isfinite([low, high]).all():
        text += f"\n[{signed(low, digits)}, {signed(high, digits)}]"
    ax.annotate(text, (at, mean), (7, 0), textcoords="offset points", va="center", fontsize=8)


def _tick(rows: pd.DataFrame, label: str) -> str:
    sizes = rows["spans"].str.split().str.len()
    items, spans = rows["item"].nunique(), int(sizes.sum())
    together = ", an item's together" if (sizes > 1).any() else ""
    right = f"answer right in {rows.groupby('item')['score'].mean().mean():.0%}" if "score" in rows else ""
    return "\n".join([LOOKS[label].name, f"n = {plural(items, 'item')}, {plural(spans, 'span')}{together}", right]).rstrip()


def _scale(ax: Axes, values: np.ndarray[Any, Any]) -> None:
    from matplotlib.ticker import FuncFormatter

    ax.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
    low, high = (float(np.nanmin(values)), float(np.nanmax(values))) if np.isfinite(values).any() else (0.0, 0.0)
    ax.set_ylim(min(2 * low, -0.03), max(2.5 * high, 0.03))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}".replace("-", "−") if value else "0"))

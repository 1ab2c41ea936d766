"""Curves of ``kvprobe sinks``: buckets at every generated token, and what ε changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D

from kvprobe.plots.masses import _ticks as decades
from kvprobe.plots.perturbations import whole_numbers
from kvprobe.plots.sink_looks import CLASSES, about, left_in
from kvprobe.plots.style import GREY, LOOKS, WIDTH, Look, Sheet, headline, plural, sheet, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

COURSES = {
    "first4": CLASSES["first4"],
    "evidence": CLASSES["evidence"],
    "secondary_sink": CLASSES["secondary_sink"],
    "hard": LOOKS["hard"],
    "decoy": Look("decoy: planted fact", "black", "s", 5, filled=False),
    "distractor": Look("other sentences, drawn (D)", "#B8860B", "o", 5),
    "question": Look("question", "#56B4E9", "v", 6),
    "generated": Look("generated so far", "#CC79A7", ">", 6),
    "other": Look("other context", GREY, "x", 5),
    "learned_sink": Look("learned sink", "black", "X", 6),
}
GENERATED = "those that predict the generated tokens"


@styled
def courses(table: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """Mass, value and ρ of every bucket at every generated token: means over items, thin lines single items."""
    figure = sheet(WIDTH, 4.6)
    axes = figure.subplots(1, 3, sharex=True)
    found = summary["courses"]
    kept = table[~table["layer"].isin(summary["layers"]["excluded"])]
    single = kept.groupby(["item", "bucket", "token"])[["mass", "value"]].mean().reset_index()
    single["ratio"] = single["value"] / single["mass"].where(single["mass"] > 0)
    labels = ("mass Σ A (share of a row)", f"value Σ A m (L{summary['settings']['p']} norm, no ε)", "ρ = Σ A m / Σ A")
    for ax, column, label in zip(axes, ("mass", "value", "ratio"), labels, strict=True):
        for name, look in COURSES.items():
            if name in found["buckets"]:
                _course(ax, single[single["bucket"] == name], found["buckets"][name][column], column, look)
        ax.set(title=label, xlabel="generated token (of the row that predicts it)")
        if any((value or 0) > 0 for bucket in found["buckets"].values() for value in bucket[column]):
            ax.set_yscale("log")
            decades(ax.yaxis)
        whole_numbers(ax.xaxis, len(found["n"]))
    handles = [
        Line2D([], [], **_line(look), label=look.name) for name, look in COURSES.items() if name in found["buckets"]
    ]
    n = found["n"]
    fewer = (
        ""
        if min(n) == max(n)
        else f" Items generate {sum(k == n[0] for k in n)} … {len(n)} tokens; later means are of fewer items."
    )
    note = (
        f"Row t is the query that predicts generated token t. Thick: mean over {plural(found['n_items'], 'item')}, "
        f"heads and layers{left_in(summary)}; thin: items. Masses of an item without the class count as 0. "
        f"Logarithmic; zeros are not drawn.{fewer}"
    )
    headline(
        figure,
        "Attention of each generated token, by class of position",
        about(summary, GENERATED),
        note,
        handles,
        ncols=4,
    )
    return figure


def _line(look: Look) -> dict[str, Any]:
    marks = look.marks(0.75) | {"linestyle": "-"}
    return marks | {"color": look.colour, "linewidth": 1.6}


def _course(ax: Axes, rows: pd.DataFrame, means: Sequence[float | None], column: str, look: Look) -> None:
    for _, item in rows.groupby("item"):
        ax.plot(
            item["token"], item[column].where(item[column] > 0), color=look.colour, lw=0.4, alpha=0.5, label="_item"
        )
    y = np.array([value if value else math.nan for value in means])
    ax.plot(range(len(y)), y, **_line(look), label=look.name)


@styled
def epsilon_sweep(summary: Mapping[str, Any]) -> Sheet:
    """Value mass per token of each class, AUROC of evidence above first4, and rank correlations, against ε."""
    rows = summary["epsilon_sweep"]
    figure = sheet(WIDTH, 4.4)
    left, middle, right = figure.subplots(1, 3)
    x = np.arange(len(rows))
    for name, look in CLASSES.items():
        values = [_or_nan(row["value_mass_per_token"].get(name)) for row in rows]
        if np.isfinite(values).any():
            left.plot(x, values, **_line(look), label=look.name)
    left.set_yscale("log")
    decades(left.yaxis)
    left.set_title("value mass (s + ε) m per token")
    _interval_line(middle, x, [row["auroc"] for row in rows], "#D55E00")
    middle.axhline(0.5, color=GREY, lw=0.9, ls=":", zorder=0)
    middle.set(title="AUROC of value mass: evidence\nabove the first 4 (0.5: no difference)", ylim=(-0.03, 1.03))
    for name, (label, colour, marker) in RANKS.items():
        right.plot(x, [_or_nan(row[name]) for row in rows], color=colour, marker=marker, ms=4.5, label=label)
    right.axhline(0, color=GREY, lw=0.9, ls=":", zorder=0)
    right.set(title="Spearman over keys, mean over heads", ylim=(-1.05, 1.05))
    right.legend(fontsize=7.5, loc="lower left")
    for ax in (left, middle, right):
        ax.set_xticks(x, [f"{row['epsilon']:g}" for row in rows], fontsize=8)
        ax.set_xlabel("ε (steps not to scale)")
    handles = [Line2D([], [], **_line(look), label=look.name) for look in CLASSES.values() if look.name in _drawn(left)]
    note = (
        f"Left: means over heads, layers{left_in(summary)} and inputs that have the class. Middle: bars are 95 % over "
        "inputs. Right: ε gives every key ε m for being there; once ε exceeds s, the order of value masses is no "
        "longer that of s m, and a ratio with ε inside ranks keys by rarity (−s) instead of by what they carry (m). ρ "
        "elsewhere has no ε."
    )
    headline(figure, "What ε does", about(summary), note, handles, ncols=5)
    return figure


RANKS = {
    "spearman_value_mass": ("(s + ε) m with s m", "black", "o"),
    "spearman_ratio_norm": ("m (1 + ε/s) with m", "#0072B2", "s"),
    "spearman_ratio_mass": ("m (1 + ε/s) with −s", "#D55E00", "^"),
}


def _drawn(ax: Axes) -> set[str]:
    return {str(line.get_label()) for line in ax.get_lines()}


def _interval_line(ax: Axes, x: np.ndarray[Any, Any], rows: Sequence[Mapping[str, Any]], colour: str) -> None:
    mean, low, high = (np.array([_or_nan(row[name]) for row in rows]) for name in ("mean", "ci_low", "ci_high"))
    known = np.isfinite(low) & np.isfinite(high)
    ax.vlines(x[known], low[known], high[known], colors=colour, linewidth=1.2)
    ax.plot(x, mean, color=colour, marker="D", ms=5, label="AUROC")


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)

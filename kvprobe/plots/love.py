"""Love plots: how alike targets and their placebos are, before and after matching."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvprobe.errors import StatisticsError
from kvprobe.plots.style import GREY, WIDTH, Sheet, headline, plural, sheet, styled
from kvprobe.stats.balance import THRESHOLD

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

VARIABLES = {
    "bound": "θ, bound",
    "perturbation": "L, perturbation",
    "centred": "θ_c, centred bound",
    "value_mass": "w, value mass",
    "mass": "a, attention mass",
    "length": "length (tokens)",
    "position": "position in the context",
}
"""Column → what it is called, in the order of the rows; strengths are compared as logarithms."""
BEFORE: dict[str, Any] = {"marker": "o", "color": "#0072B2", "markerfacecolor": "white", "markersize": 6}
AFTER: dict[str, Any] = {"marker": "o", "color": "#D55E00", "markersize": 6}
COLUMNS = {"before": ("smd_before", "before_low", "before_high"), "after": ("smd_after", "after_low", "after_high")}
APART = 0.15
"""Half the distance of a row's two points, in rows."""
LINEAR = 0.5
"""|SMD| up to here is drawn to scale where larger ones than WIDE occur."""
WIDE = 2.0
TICKS = (0.25, 1, 3, 10, 30, 100, 300, 1000)
DECADES, CROWDED = (1, 10, 100, 1000), 20.0  # the dotted lines stand for 0.25 there


@styled
def love(balance: pd.DataFrame, match_on: str | None = None, summary: Mapping[str, Any] | None = None) -> Sheet:
    """Standardised mean differences of every variable before (hollow) and after matching (filled).

    One panel a way of matching, one row a variable; lines at 0 and ±0.25. The variables that were matched on are bold,
    with their max |ln ratio| beside the row: they are judged by that, the others by their SMD. Where an |SMD| exceeds
    2, the axis is logarithmic beyond 0.5; an infinite one (no spread at all) is a triangle at the edge.

    Parameters
    ----------
    balance
        One row a variable: ``match_on``, ``variable``, ``matched``, ``max_abs_ln_ratio``, ``smd_before``,
        ``before_low``, ``before_high``, ``smd_after``, ``after_low``, ``after_high``, ``n``, ``flagged``. NaN: not
        drawn.
    match_on
        The panel to draw; None: all in the table, in its order.
    summary
        What the figure's subtitle names: ``model``, ``task``, ``length``, ``seed``.

    Raises
    ------
    StatisticsError
        The table is empty, or has no rows matched on ``match_on``.
    """
    names = list(dict.fromkeys(balance["match_on"])) if match_on is None else [match_on]
    frames = [_ordered(balance[balance["match_on"] == name]) for name in names]
    if not frames or any(frame.empty for frame in frames):
        known = list(dict.fromkeys(balance["match_on"]))
        raise StatisticsError(f"match_on={match_on!r}: no such rows of balance; it has {known or 'none'}")
    figure = sheet(WIDTH, 1.9 + 0.42 * max(map(len, frames)))
    shown = balance[balance["match_on"].isin(names)]
    limits = _limits(shown)
    for ax, name, frame in zip(figure.subplots(1, len(names), squeeze=False)[0], names, frames, strict=True):
        love_panel(ax, frame, limits)
        ax.set_title(f"matched on {VARIABLES.get(name, name)}: {_count(frame)}")
    note = (
        "SMD: mean difference of target and controls within an item ÷ SD before matching, the same for both points; "
        "strengths (θ, L, θ_c, w, a) as logarithms. Bars: 95 % intervals over items, where defined. Dotted: ±0.25, "
        "descriptive. Bold: matched on, judged by max |ln ratio| over its items."
    )
    note += " †: no spread among items, an SMD says nothing." if shown["flagged"].any() else ""
    headline(figure, "Are the placebos like their targets?", about(summary), note, _handles(shown))
    return figure


def about(summary: Mapping[str, Any] | None) -> str:
    """Model, task, length, seed: what is known of them."""
    known = {key: value for key, value in (summary or {}).items() if value is not None}
    said = {"model": "{}", "task": "{}", "length": "{} tokens", "seed": "seed {}"}
    parts = [text.format(known[key]) for key, text in said.items() if key in known]
    return " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


@styled
def love_panel(ax: Axes, rows: pd.DataFrame, limits: tuple[float, float] | None = None) -> None:
    """One way of matching on given axes; rows from above, SMDs within ``limits`` (None: what the rows need)."""
    rows, limits = _ordered(rows), _limits(rows) if limits is None else limits
    places = len(rows) - 1 - np.arange(len(rows))
    _scale(ax, limits)
    for at in (-THRESHOLD, 0.0, THRESHOLD):
        ax.axvline(at, color=GREY, linewidth=0.9, linestyle=":" if at else "-", zorder=0)
    for name, look, shift in (("before", BEFORE, APART), ("after", AFTER, -APART)):
        _points(ax, rows[list(COLUMNS[name])].to_numpy(float), places + shift, look, name, limits)
    ax.set_ylim(-0.6, len(rows) - 0.4)
    marks = ["†" if flagged else "" for flagged in rows["flagged"]]
    ax.set_yticks(places, [VARIABLES.get(v, v) + m for v, m in zip(rows["variable"], marks, strict=True)])
    for label, matched in zip(ax.get_yticklabels(), rows["matched"], strict=True):
        label.set_fontweight("bold" if matched else "normal")
    ax.set_xlabel("standardised mean difference, target − controls (SDs)")
    for place, matched, ratio in zip(places, rows["matched"], rows["max_abs_ln_ratio"].astype(float), strict=True):
        if matched and np.isfinite(ratio):
            text = f"max |ln ratio|\n{ratio:.3g}"
            ax.annotate(text, (1.0, place), (4, 0), ax.get_yaxis_transform(), "offset points", va="center", fontsize=8)


def _points(
    ax: Axes, values: Any, places: Any, look: Mapping[str, Any], name: str, limits: tuple[float, float]
) -> None:
    for (_, low, high), y in zip(values, places, strict=True):
        if np.isfinite([low, high]).all():
            ax.plot([low, high], [y, y], color=look["color"], linewidth=1.2, zorder=2)
    smd = values[:, 0]
    seen, endless = np.isfinite(smd), np.isinf(smd)
    ax.plot(smd[seen], places[seen], **{"linestyle": "none", "zorder": 3, **look}, label=name)
    for x, y in zip(np.sign(smd[endless]), places[endless], strict=True):
        mark = {"marker": ">" if x > 0 else "<", "linestyle": "none", "zorder": 3, "clip_on": False}
        ax.plot(limits[int(x > 0)], y, **{**look, **mark}, label=f"{name}, infinite")


def _ordered(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order of `VARIABLES`, others below; those without any SMD are left out."""
    known = rows[rows[["smd_before", "smd_after"]].notna().any(axis=1)]
    order = {name: place for place, name in enumerate(VARIABLES)}
    return known.sort_values("variable", key=lambda names: names.map(order).fillna(len(order)), kind="stable")


def _limits(rows: pd.DataFrame) -> tuple[float, float]:
    """Where the axis ends: beyond every finite SMD, and beyond intervals unless they are wider than twice that."""
    points, low, high = (rows[list(names)].to_numpy(float) for names in zip(*COLUMNS.values(), strict=True))
    largest = float(np.abs(points[np.isfinite(points)]).max(initial=0.4))
    ends = np.concatenate([each[np.isfinite(each)] for each in (points, low, high)])
    reach = np.clip(ends, -2 * largest, 2 * largest)
    return min(1.15 * float(reach.min(initial=0.0)), -0.45), max(1.15 * float(reach.max(initial=0.0)), 0.45)


def _scale(ax: Axes, limits: tuple[float, float]) -> None:
    low, high = limits
    if max(-low, high) > WIDE:
        ax.set_xscale("symlog", linthresh=LINEAR, linscale=1.3)
        # Three decades on one side leave no room for two ticks each.
        steps = TICKS if max(-low, high) < CROWDED else DECADES
        ticks = sorted({0.0, *steps, *(-tick for tick in steps)})
        ax.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if low < tick < high]))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.tick_params(axis="x", labelsize=8)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    ax.set_xlim(low, high)


def _count(rows: pd.DataFrame) -> str:
    """``n = 12 items``; a range where variables differ."""
    low, high = int(rows["n"].min()), int(rows["n"].max())
    return f"n = {plural(high, 'item')}" if low == high else f"n = {low}–{high} items"


def _handles(rows: pd.DataFrame) -> list[Any]:
    """Only points that occur."""
    names = {"before": ("before: length-only windows", BEFORE), "after": ("after: the chosen placebos", AFTER)}
    return [
        Line2D([], [], **{"linestyle": "none"} | look, label=text)
        for name, (text, look) in names.items()
        if rows[COLUMNS[name][0]].notna().any()
    ]

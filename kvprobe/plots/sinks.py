"""The figures of ``kvprobe sinks``, drawn from its tables and its summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvprobe.plots.masses import _ticks as decades
from kvprobe.plots.perturbations import whole_numbers
from kvprobe.plots.sink_curves import courses, epsilon_sweep
from kvprobe.plots.sink_looks import CLASSES, EXPLORATORY, about, left_in
from kvprobe.plots.strips import token_strip
from kvprobe.plots.style import GREY, WIDTH, Sheet, headline, plural, sheet, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

FIRST = LinearSegmentedColormap.from_list("first", ["#FFFFFF", "#9ECAE1", "#2171B5", "#08306B"])


def sink_figures(tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> dict[str, Sheet]:
    """Name → figure of one run.

    ``mass_value_mass``: what classes of tokens take and carry. ``token_strip``: one input, token by token.
    ``sink_map``: attention to the first position by layer and head. ``epsilon_sweep``: what ε changes, where there is
    evidence. ``courses``: buckets at every generated token, where they were made.

    Parameters
    ----------
    tables
        What ``tables()`` of :class:`kvprobe.sinks.Result` returns.
    summary
        What ``kvprobe sinks`` prints with ``--json``; a summary read back from its file does, too.
    """
    figures = {
        "mass_value_mass": mass_value_mass(tables["tokens"], summary),
        "token_strip": strip_of(tables, summary),
        "sink_map": sink_map(tables["sinks"], summary),
    }
    if summary["auroc"]["mass"]["n"]:
        figures["epsilon_sweep"] = epsilon_sweep(summary)
    if summary["courses"]:
        figures["courses"] = courses(tables["courses"], summary)
    return figures


@styled
def mass_value_mass(tokens: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """One point a token of an input: mean mass over heads and layers against mean s m, on logarithmic axes.

    Dashed diagonals: constant height over mass, which is the token's ρ where all layers see it on equally many rows
    (elsewhere ρ weighs layers by the rows that see it). Keys without any mass have no place there.
    """
    figure = sheet(WIDTH, 5.6)
    ax = figure.subplots()
    seen = tokens[(tokens["mass"] > 0) & (tokens["value"] > 0)]
    ax.set(xscale="log", yscale="log")
    handles = []
    for order, (name, look) in enumerate(CLASSES.items()):
        rows = seen[seen["bucket"] == name]
        if rows.empty:
            continue
        faint = 0.25 if name == "other" else 0.7
        ax.plot(rows["mass"], rows["value"], **look.marks(1.0, len(rows)), alpha=faint, zorder=2 + order, label=name)
        if name != "first4":
            face = {"markerfacecolor": look.colour if look.filled else "white", "markeredgecolor": "black"}
            median = rows[["mass", "value"]].median()
            ax.plot(*median, **look.marks(1.0) | face | {"markersize": 11}, zorder=20 + order, label=f"{name} median")
        handles.append(Line2D([], [], **look.marks(), label=f"{look.name}, {plural(len(rows), 'token')}"))
    _numbered(ax, seen)
    _diagonals(ax, seen, "value / mass" if _windowed(seen) else "ρ")
    decades(ax.xaxis)
    decades(ax.yaxis)
    p = summary["settings"]["p"]
    ax.set_xlabel("mass s: mean attention a row gives the token (share; mean over heads and layers)")
    ax.set_ylabel(rf"value mass without ε: mean of $s\,\Vert V W_O\Vert_{p}$")
    handles.append(Line2D([], [], color="black", marker="o", ls="none", mfc="none", ms=9, label="median of a class"))
    name = "value / mass" if _windowed(seen) else "ρ"
    label = f"constant {name} (numbers: its value)"
    handles.append(Line2D([], [], color=GREY, linestyle="--", linewidth=0.8, label=label))
    hidden = len(tokens) - len(seen)
    note = (
        f"One point a token of an input; numbers: positions 0 … 3 (their medians over inputs). Means over heads and "
        f"layers{left_in(summary)}; masses are means over the rows that see the token. {_lines(seen)} Far right and on "
        "a low line: much attention, little value with it, as a sink has; far right and on the line of the others: "
        "much attention and their value with it. Whether it is read, this does not show."
        + (f" Not drawn: {plural(hidden, 'token')} without attention." if hidden else "")
    )
    headline(figure, "What tokens take and what they carry", about(summary), note, handles, ncols=4)
    return figure


def _numbered(ax: Axes, seen: pd.DataFrame) -> None:
    """Number the first positions at the median of each over inputs."""
    first = seen[seen["bucket"] == "first4"]
    if first.empty:
        return
    places = first["position"] - first.groupby("item")["position"].transform("min")
    for place, rows in first.groupby(places):
        x, y = rows["mass"].median(), rows["value"].median()
        style: dict[str, Any] = {"fontsize": 9, "fontweight": "bold", "color": CLASSES["first4"].colour, "zorder": 40}
        box = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": CLASSES["first4"].colour, "lw": 0.8}
        ax.annotate(
            str(int(place)), (x, y), (9, -14 if place % 2 else 6), textcoords="offset points", bbox=box, **style
        )


def _windowed(seen: pd.DataFrame) -> bool:
    """Whether windows make ρ, whose sums are over rows, differ from the ratio of two means over the rows that see."""
    return not np.allclose(seen["value"] / seen["mass"], seen["ratio"], rtol=1e-3)


def _lines(seen: pd.DataFrame) -> str:
    """What is the same along a dashed line."""
    if not _windowed(seen):
        return "Along a dashed line, value per mass ρ is the same."
    return (
        "Along a dashed line, value over mass is the same; it is not quite ρ, which weighs layers by the rows that see "
        "the token through their windows."
    )


def _diagonals(ax: Axes, seen: pd.DataFrame, name: str) -> None:
    """Lines of constant y / x at 1 and 3 of each decade, numbered at the right edge."""
    if seen.empty:
        return
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    low, high = (
        float(np.log10(end)) for end in ((seen["value"] / seen["mass"]).min(), (seen["value"] / seen["mass"]).max())
    )
    steps = (1, 3) if high - low < 2.5 else (1,)
    every = (step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps)
    for ratio in (ratio for ratio in every if low - 0.2 <= math.log10(ratio) <= high + 0.2):
        ax.plot([left, right], [ratio * left, ratio * right], "--", color=GREY, lw=0.7, zorder=0, label="_ratio")
        x, y = (right, ratio * right) if ratio * right <= top else (top / ratio, top)
        if left < x <= right and bottom < y <= top:
            ax.text(
                x,
                y,
                f" {'ρ ' if name == 'ρ' else ''}{ratio:g}",
                fontsize=7,
                color=GREY,
                va="center" if x == right else "bottom",
            )
    ax.set(xlim=(left, right), ylim=(bottom, top))


def strip_of(tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> Sheet:
    """The strip of the run's first input."""
    items, tokens = tables["items"], tables["tokens"]
    first = items["index"].iloc[0]
    what = f"{summary['model']} · {summary['task'] or summary['docs']}: {items['name'].iloc[0]}"
    looks = {name: CLASSES[name] for name in ("first4", "evidence", "secondary_sink", "recent", "other")}
    line = f"{what} · rows: {summary['rows']} · seed {summary['seed']} · {EXPLORATORY}{left_in(summary)}"
    return token_strip(tokens[tokens["item"] == first].reset_index(drop=True), looks, summary, line)


@styled
def sink_map(sinks: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """Mass on the first position by layer and head, mean over inputs; a dot where it exceeds the threshold."""
    means = sinks.groupby(["layer", "head"])["first"].mean().reset_index()
    row = summary["heads_sinky"]
    grid = np.full((int(means["head"].max()) + 1, int(means["layer"].max()) + 1), np.nan)
    grid[means["head"], means["layer"]] = means["first"]
    figure = sheet(WIDTH, min(max(0.28 * len(grid), 1.6), 4.5) + 1.6)
    ax = figure.subplots()
    image = ax.imshow(grid, cmap=FIRST, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    head, layer = np.nonzero(grid > row["threshold"])
    ax.plot(layer, head, linestyle="none", marker="o", markersize=3, mfc="white", mec="black", mew=0.6, label="sinky")
    for place in summary["layers"]["excluded"]:
        ax.axvspan(place - 0.5, place + 0.5, facecolor="none", edgecolor="black", hatch="////", linewidth=0)
    whole_numbers(ax.xaxis, grid.shape[1])
    whole_numbers(ax.yaxis, grid.shape[0])
    ax.set(xlabel="layer", ylabel="head")
    figure.colorbar(image, ax=ax, pad=0.01, aspect=15).set_label("s of the\nfirst position")
    keys: list[Any] = [
        Line2D([], [], ls="none", marker="o", ms=4, mfc="white", mec="black", label="above the threshold")
    ]
    if summary["layers"]["excluded"]:
        keys.append(Patch(facecolor="none", edgecolor="black", hatch="////", label="layer excluded beforehand"))
    interval = (
        "" if row["ci_low"] is None else f" [95 % over inputs {100 * row['ci_low']:.1f}, {100 * row['ci_high']:.1f}]"
    )
    note = (
        f"Colour: s of the first position, mean over the rows that see it (in a layer with a window no others count; 0 "
        f"where none does) and over inputs. Of {row['n_heads']} heads, {100 * row['share']:.1f} %{interval} have s "
        f"above {row['threshold']:g} (counted in each input, then averaged)."
    )
    headline(figure, "Attention on the first position, head by head", about(summary), note, keys, ncols=2)
    return figure

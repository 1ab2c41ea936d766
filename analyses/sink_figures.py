"""The figures of the analyses of sinks and heads, drawn from their tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from needle_items import subtitle

from kvprobe.plots import headline, sheet
from kvprobe.plots.style import GREY, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

ORANGE, BLUE, GREEN, PURPLE = "#D55E00", "#0072B2", "#009E73", "#CC79A7"
SCORES: dict[str, dict[str, Any]] = {
    "relative_ratio": {"color": ORANGE, "marker": "o", "linestyle": "-"},
    "ratio": {"color": "#E69F00", "marker": "s", "linestyle": "--"},
    "relative_norm": {"color": GREY, "marker": "^", "linestyle": ":"},
    "norm": {"color": "black", "marker": "v", "linestyle": ":"},
    "mass": {"color": BLUE, "marker": "D", "linestyle": "-"},
    "value_mass": {"color": GREEN, "marker": "P", "linestyle": "--"},
}
BY_LAYER = ("relative_ratio", "mass", "value_mass")
TASKS: tuple[dict[str, Any], ...] = ({"mfc": None}, {"mfc": "white"}, {"mfc": "#DDDDDD"})
"""Fill of a task's markers; None: filled."""
ROWS = {"suffix": "question and answer rows", "answer": "rows that predict the answer"}


@styled
def sink_or_search(df: pd.DataFrame, classes: Mapping[str, str], measures: Mapping[str, str]) -> Figure:
    """A column a contrast: pooled AUROC above, by layer below (a row a task); last, heads by their two masses."""
    tasks = list(df.attrs["about"]["tasks"])  # of a task whose windows hide the evidence df has no row
    heads, kinds = df.attrs["tables"]["heads"], df.attrs["tables"]["kinds"]
    figure = sheet(9.8, 3.9 + 2.1 * (1 + len(tasks)))
    grid = figure.add_gridspec(2 + len(tasks), len(classes), height_ratios=(1.2, *[1.0] * len(tasks), 1.3))
    for column, (contrast, name) in enumerate(classes.items()):
        rows = df[df["contrast"] == contrast]
        _pooled(figure.add_subplot(grid[0, column]), rows, tasks, measures, f"evidence above\n{name}", not column)
        for place, task in enumerate(tasks, 1):
            ax = figure.add_subplot(grid[place, column])
            _by_layer(ax, rows[rows["task"] == task], task if not column else "", heads["layer"].max())
    panels = [(task, rows) for task in tasks for rows in ROWS]
    lower, axes = grid[-1, :].subgridspec(1, len(panels)), []
    for place, (task, rows) in enumerate(panels):
        mine, count = (table[(table["task"] == task) & (table["rows"] == rows)] for table in (heads, kinds))
        axes.append(figure.add_subplot(lower[place]))
        points = _masses(axes[-1], mine, count.iloc[0], f"{task}\n{ROWS[rows]}", df.attrs["about"])
    axes[0].set_ylabel("mass on the evidence")
    figure.colorbar(points, ax=axes, label="layer", pad=0.01, fraction=0.03)
    about = df.attrs["about"]
    handles = [Line2D([], [], **look, label=measures[name]) for name, look in SCORES.items()]
    headline(
        figure, "Does value tell a sink from a search?", f"{subtitle(about)} each", _reading(about, tasks), handles
    )
    return figure


def _reading(about: Mapping[str, Any], tasks: list[str]) -> str:
    fills = ("filled", "open", "grey")
    named = ", ".join(f"{fill}: {task}" for fill, task in zip(fills, tasks, strict=False))
    return (
        "AUROC within an item, P(evidence token has more), mean over items; bars: 95 % over items (wide where "
        f"all agree). Above: all heads pooled ({named}). m is of V W_O in the L{about['norm']} norm. Below: masses of "
        f"every head, mean over items; lines at {about['sink']:g} (sink head) and {about['search']:g} (search head). "
        "All means over question and teacher-forced answer rows unless said otherwise. A secondary sink has the first "
        "position's direction by definition, and with it its value. Exploratory."
    )


def _pooled(
    ax: Any, rows: pd.DataFrame, tasks: list[str], measures: Mapping[str, str], title: str, named: bool
) -> None:
    ax.axvline(0.5, color="black", linewidth=0.8, linestyle=":")
    for number, task in enumerate(tasks):
        mine = rows[(rows["layer"] == -1) & (rows["task"] == task)].set_index("measure")
        for place, name in enumerate(measures):
            if name in mine.index:
                row, y = mine.loc[name], -(place + 0.26 * (number - (len(tasks) - 1) / 2))
                look = SCORES[name] | {"linestyle": "none", "mfc": TASKS[number % 3]["mfc"] or SCORES[name]["color"]}
                ax.plot(row["mean"], y, **look, markersize=5, label=f"{task} {name}")
                ax.hlines(y, row["low"], row["high"], colors=look["color"], linewidth=1.2)
    short = {"relative_ratio": "ρ, relative", "ratio": "ρ", "relative_norm": "m, relative", "norm": "m"}
    short |= {"mass": "s", "value_mass": "s^val"}
    ax.set_yticks([-place for place in range(len(measures))], [short[name] if named else "" for name in measures])
    ax.set(xlim=(-0.03, 1.03), xlabel="AUROC, heads pooled")
    ax.set_title(title, fontsize=8)


def _by_layer(ax: Any, rows: pd.DataFrame, label: str, last: int) -> None:
    ax.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
    for name in BY_LAYER:
        mine = rows[(rows["measure"] == name) & (rows["layer"] >= 0)].sort_values("layer")
        if len(mine):
            ax.plot(mine["layer"], mine["mean"], **SCORES[name], markersize=3, linewidth=1.0, label=name)
            ax.fill_between(mine["layer"], mine["low"], mine["high"], color=SCORES[name]["color"], alpha=0.15, lw=0)
    if rows.empty:
        ax.text(0.5, 0.5, "no such tokens seen", transform=ax.transAxes, ha="center", va="bottom", color=GREY)
    ax.set(xlim=(-0.6, last + 0.6), ylim=(-0.03, 1.03), xlabel="layer", ylabel=f"AUROC\n{label}" if label else "")


def _masses(ax: Any, heads: pd.DataFrame, count: Any, title: str, about: Mapping[str, Any]) -> Any:
    points = ax.scatter(heads["first"], heads["evidence"], c=heads["layer"], s=9, cmap="viridis", linewidths=0)
    ax.axvline(about["sink"], color="black", linewidth=0.8, linestyle=":")
    ax.axhline(about["search"], color="black", linewidth=0.8, linestyle=":")
    said = f"{count['sink']} sink, {count['search']} search,\n{count['both']} both ({count['expected']:.1f} by chance)"
    ax.set(xlim=(-0.02, 1.0), ylim=(-0.02, max(0.25, 1.05 * heads["evidence"].max())))
    ax.set_xlabel("mass on the first position", fontsize=8)
    ax.set_title(f"{title}\n{said}", fontsize=8)
    return points

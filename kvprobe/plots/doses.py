"""Dose and response: the effect of a weaker and weaker mask against the strength of its blow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvprobe.errors import StatisticsError
from kvprobe.plots.effects import ARMS, FAINT, LOGARITHMIC, MEASURES, require, scale, selected, undrawn
from kvprobe.plots.love import VARIABLES, about
from kvprobe.plots.style import WIDTH, Sheet, headline, plural, sheet, styled
from kvprobe.stats.intervals import mean_interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

FULL = {"target": "dose_target", "placebo": "dose_placebo"}
"""Full mask (κ = 1) → its weaker doses."""
LINES: dict[str, Any] = {"target": "-", "placebo": (0, (4, 1.5))}
"""Lines of the mean curves: they are told apart in grey, too."""
STRENGTHS = {
    "perturbation": "strength L, perturbation of the attention output",
    "bound": "strength θ, bound on the perturbation",
    "centred": "strength θ_c, centred bound on the perturbation",
    "value_mass": "strength w, value mass of what is masked",
    "mass": "strength a, attention mass of what is masked",
}
TITLE = "At equal strength, does the target do more than its placebos?"


@styled
def dose_response(
    arms: pd.DataFrame,
    strength: str = "perturbation",
    measure: str = "delta_logprob",
    match_on: str | Sequence[str] = "perturbation",
    summary: Mapping[str, Any] | None = None,
) -> Sheet:
    """Effect against the strength of the blow, for targets and placebos; one panel a way of matching.

    The x axis is the strength in closed form on the clean run's logits, so that a dose of the target and one of a
    placebo stand side by side where their blows are equal. Thin: one set of an item over κ (filled: the full mask,
    κ = 1). Thick: mean over answered items at one κ (x: geometric mean of strengths; bars: 95 % interval), sets
    averaged within their item first. It describes; the contrast is tested at κ = 1.

    Parameters
    ----------
    arms
        One row an arm: ``item``, ``arm`` (``dose_target``, ``dose_placebo`` and the full ``target``, ``placebo``),
        ``match_on``, ``kappa``, ``spans``, ``answered``, a strength and a measure. NaN and strengths of 0 or less
        have no place on a logarithmic axis: not drawn, and counted.
    strength, measure
        Columns of the table.
    match_on, summary
        As for :func:`kvprobe.plots.effects`.

    Raises
    ------
    StatisticsError
        No such column, or nothing to draw.
    """
    names, kinds = [match_on] if isinstance(match_on, str) else list(match_on), [*FULL, *FULL.values()]
    require(arms, [strength, measure, "kappa"])
    arms = arms.assign(**{strength: arms[strength].where(arms[strength].astype(float) > 0)})
    frames = [_doses(selected(arms, name, kinds, [strength, measure])) for name in names]
    if not names or any(frame.empty for frame in frames):
        raise StatisticsError(f"match_on={match_on!r}: no arm of {kinds} has {strength} > 0 and {measure}")
    figure = sheet(WIDTH, 5.0)
    axes = figure.subplots(1, len(names), sharex=True, sharey=True, squeeze=False)[0]
    for ax, name, frame in zip(axes, names, frames, strict=True):
        dose_panel(ax, frame, strength, measure)
        ax.set_title(f"placebos matched on {VARIABLES.get(name, name)}")
        ax.label_outer()
    _logarithmic(axes[0], np.concatenate([frame[strength] for frame in frames]))  # all panels share it
    scale(list(axes), measure)
    lost = undrawn(arms, names, kinds, [strength, measure])
    note = _note(frames, measure) + (f" Not drawn: {plural(lost, 'arm')} without strength or value." if lost else "")
    headline(figure, TITLE, about(summary), note, _handles(frames), ncols=3)
    return figure


def _doses(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with ``side`` (target or placebo), κ (1: the full mask) and ``curve``: True for sets that have doses."""
    side = rows["arm"].replace({dose: full for full, dose in FULL.items()})
    kappa = rows["kappa"].astype(float).where(~rows["arm"].isin(list(FULL)), 1.0)
    sets = [name for name in ("spans", "number") if name in rows][:1]  # the same tokens under a weaker mask
    rows = rows.assign(side=side, kappa=kappa, curve=rows["arm"].isin(list(FULL.values())))
    groups = rows.groupby(["item", "side", *sets], sort=False, dropna=False)
    return rows.assign(curve=groups["curve"].transform("any"), set=groups.ngroup()).sort_values(["set", "kappa"])


def dose_panel(ax: Axes, rows: pd.DataFrame, strength: str, measure: str) -> None:
    """One way of matching on given axes."""
    rows = rows.assign(counted=rows["answered"] if rows["answered"].any() else ~rows["answered"])
    ax.axhline(0, color="black", linewidth=0.8, zorder=1)
    for side in FULL:
        mine = rows[rows["side"] == side]
        for _, of_set in mine[mine["curve"]].groupby("set"):
            dark = bool(of_set["counted"].all())
            _curve(ax, of_set, strength, measure, side, 0.45 if dark else 0.45 * FAINT)
        _full(ax, mine[mine["kappa"] == 1], strength, measure, side)
        _means(ax, mine[mine["counted"] & mine["curve"]], strength, measure, side)
    _logarithmic(ax, rows[strength].to_numpy(float))
    ax.set(xlabel=STRENGTHS.get(strength, strength), ylabel=MEASURES.get(measure, measure))


def _full(ax: Axes, rows: pd.DataFrame, strength: str, measure: str, side: str) -> None:
    """Full masks of one side; hollow where the item is in no mean."""
    for dark in (True, False):
        mine = rows[rows["counted"] == dark]
        marks = ARMS[side].marks(0.8, len(mine)) | ({} if dark else {"markerfacecolor": "white"})
        if len(mine):
            label = f"{side}, full mask" + ("" if dark else ", not answered")
            ax.plot(mine[strength], mine[measure], **marks, alpha=0.7 if dark else FAINT, zorder=3, label=label)


def _curve(ax: Axes, rows: pd.DataFrame, strength: str, measure: str, side: str, alpha: float) -> None:
    look: dict[str, Any] = {
        "color": ARMS[side].colour,
        "linewidth": 0.8,
        "alpha": alpha,
        "marker": ".",
        "markersize": 3,
        "zorder": 2,
    }
    ax.plot(rows[strength], rows[measure], label=f"{side}, item {rows['item'].iloc[0]}", **look)


def _means(ax: Axes, rows: pd.DataFrame, strength: str, measure: str, side: str) -> None:
    """Mean over items at each κ, with its interval; the sets of an item are averaged first."""
    if rows.empty:
        return
    logs = rows.assign(**{strength: np.log(rows[strength].astype(float))})
    items = logs.groupby(["kappa", "item"])[[strength, measure]].mean()
    means = items.groupby("kappa").mean()
    x, look = np.exp(means[strength].to_numpy(float)), ARMS[side]
    for at, (_, values) in zip(x, items[measure].groupby("kappa"), strict=True):
        found = mean_interval(values)
        if not found.degenerate:
            ax.plot([at, at], [found.low, found.high], color=look.colour, linewidth=1.4, zorder=4)
    ax.plot(x, means[measure], **_thick(side), label=f"{side}, mean")


def _thick(side: str) -> dict[str, Any]:
    marks = {"marker": "D", "markersize": 5, "markerfacecolor": "white", "zorder": 5}
    return {"color": ARMS[side].colour, "linewidth": 2.2, "linestyle": LINES[side]} | marks


def _logarithmic(ax: Axes, values: np.ndarray[Any, Any]) -> None:
    """Logarithmic, with numbers at 1, 2, 5 of each decade where there are few."""
    low, high = float(values.min()) / 1.3, float(values.max()) * 1.3
    steps = (1.0, 2.0, 5.0) if high / low < 300 else (1.0,)
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ax.xaxis.set_major_locator(LogLocator(subs=steps))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _note(frames: Sequence[pd.DataFrame], measure: str) -> str:
    """How to read the marks that occur."""
    kappas = sorted({float(k) for frame in frames for k in frame.loc[frame["curve"], "kappa"]})
    listed = ", ".join(f"{kappa:g}" for kappa in kappas)
    grid = f" κ (share of the full mask's L): {listed}." if kappas else ""
    answered = any(frame["answered"].any() for frame in frames)
    linear = LOGARITHMIC.get(measure)
    return (
        "Strength: in closed form, from the clean run's logits, summed over layers, mean over the query rows. Thin: "
        f"one masked set of an item at falling strength.{grid} Thick: mean over "
        f"{'answered items' if answered else 'all items (the clean arm answers none)'} at one κ, at the geometric mean "
        "of their strengths; bars: 95 % intervals over items. It describes: what is tested is the full mask."
        + (f" Grey band (±{linear:g}): to scale, logarithmic outside." if linear else "")
    )


def _handles(frames: Sequence[pd.DataFrame]) -> list[Any]:
    """Only what occurs, with the number of its items and sets."""
    handles: list[Any] = []
    for side in FULL:
        rows = [frame[frame["side"] == side] for frame in frames]
        if not any(map(len, rows)):
            continue
        look = ARMS[side]
        sets = max(int(row.loc[row["kappa"] == 1, "set"].nunique()) for row in rows)
        items = max(int(row["item"].nunique()) for row in rows)
        handles.append(
            Line2D([], [], **look.marks(0.8), label=f"{side}, κ = 1 ({plural(items, 'item')}, {plural(sets, 'set')})")
        )
        if any((row["curve"] & row["answered"]).any() for row in rows):
            handles.append(Line2D([], [], **_thick(side), label=f"{side}, mean"))
    answered = {bool(value) for frame in frames for value in frame["answered"].unique()}
    if answered == {True, False}:
        faint = {"marker": "o", "markerfacecolor": "white", "linewidth": 0.8, "alpha": FAINT}
        handles.append(Line2D([], [], color="black", **faint, label="not answered: in no mean"))  # type: ignore[arg-type]
    return handles

"""What each arm of a placebo run does to the answer, item by item."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from kvprobe.errors import StatisticsError
from kvprobe.plots.love import VARIABLES, about
from kvprobe.plots.style import GREY, WIDTH, Look, Sheet, headline, plural, sheet, signed, styled
from kvprobe.stats.intervals import mean_interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ARMS = {
    "target": Look("target", "#D55E00", "*", 10.5),
    "placebo": Look("placebo", "#0072B2", "^", 6),
    "length_only": Look("length only", GREY, "o", 4.5),
    "gate": Look("value gate on target", "#009E73", "s", 5.5),
    "injected_target": Look("injected, target's own", "#CC79A7", "P", 7),
    "injected": Look("injected, another's", "#56B4E9", "v", 6),
}
"""Arm → look, in the order of drawing; the arms clean and identity change nothing and are not drawn."""
MEASURES = {
    "delta_logprob": "change of the gold answer's\nlog-probability (nats)",
    "logprob": "log-probability of the gold answer (nats)",
    "kl": "KL(clean ‖ arm)\nat the answer (nats)",
    "flips": "argmax flips at the answer",
    "score": "score of the decoded answer",
    "settling_depth": "settling depth (layers)",
    "delta_settling": "change of the\nsettling depth (layers)",
}
LOGARITHMIC = {"delta_logprob": 0.1, "kl": 0.1}
"""Measures that span orders of magnitude → half-width of the band around 0 that is drawn to scale, in nats."""
FAINT = 0.35
GOLDEN = 0.6180339887
CHARACTERS = 115
"""A line above a panel."""
TITLE = "Does cutting out the target matter more than an equal blow elsewhere?"


@styled
def effects(
    arms: pd.DataFrame,
    match_on: str | Sequence[str] = "perturbation",
    measure: str = "delta_logprob",
    contrast: Mapping[str, Any] | Sequence[Any] | None = None,
    summary: Mapping[str, Any] | None = None,
) -> Sheet:
    """Effect by arm; one panel a way of matching, on one scale.

    One point a masked set, one thin line an item (through the mean of its sets), one diamond an arm: the mean over
    items with its 95 % interval. Items that the clean arm answers are dark; others are faint and enter no mean, unless
    there are no answered ones.

    Parameters
    ----------
    arms
        One row an arm: ``item``, ``arm``, ``match_on`` (empty for arms that belong to no matching), ``remedy``,
        ``answered`` and the measure. NaN is not drawn and counted.
    match_on
        ``perturbation``, ``bound``, or several of them.
    measure
        A column of the table.
    contrast
        ``mean``, ``ci_low``, ``ci_high``, ``p_permutation`` and, where known, ``estimand``, ``match_on``, ``n``; one or
        several. One that names no matching (or an empty one) stands in every panel.
    summary
        What the subtitle names: ``model``, ``task``, ``length``, ``seed``.

    Raises
    ------
    StatisticsError
        No such column, or no arm to draw.
    """
    names = [match_on] if isinstance(match_on, str) else list(match_on)
    frames = [selected(arms, name, ARMS, [measure]) for name in names]
    if not names or any(frame.empty for frame in frames):
        raise StatisticsError(f"match_on={match_on!r}: no arm with a {measure} to draw; drawn are {list(ARMS)}")
    present = [arm for arm in ARMS if any((frame["arm"] == arm).any() for frame in frames)]
    contrasts = [contrast] if isinstance(contrast, Mapping) else list(contrast or ())
    figure = sheet(WIDTH, 1.4 + 3.5 * len(names))
    axes = figure.subplots(len(names), 1, sharey=True, squeeze=False)[:, 0]
    for ax, name, frame in zip(axes, names, frames, strict=True):
        effect_panel(ax, frame, measure, present)
        own = [row for row in contrasts if row.get("match_on") in (None, "", name)]
        said = [line for row in own for line in textwrap.wrap(_said(row), CHARACTERS)]
        ax.set_title("\n".join([_title(name, frame), *said]))
    scale(list(axes), measure)
    lost = undrawn(arms, names, ARMS, [measure])
    note = _note(frames, measure) + (f" Not drawn: {plural(lost, 'arm')} without a value." if lost else "")
    headline(figure, TITLE, about(summary), note, _handles(frames))
    return figure


def selected(arms: pd.DataFrame, match_on: str, kinds: Iterable[str], columns: list[str]) -> pd.DataFrame:
    """Rows of these arms under one way of matching that have all ``columns``; ``answered`` is True where not known."""
    require(arms, columns)
    rows = arms[_among(arms, [match_on], kinds)]
    rows = rows[_complete(rows, columns)].reset_index(drop=True)
    return rows.assign(answered=rows["answered"].eq(True) if "answered" in rows else True)


def require(arms: pd.DataFrame, columns: list[str]) -> None:
    """Refuse a table without these columns."""
    absent = [name for name in ["item", "arm", *columns] if name not in arms]
    if absent:
        raise StatisticsError(f"column {absent[0]!r}: the table of arms has {list(arms.columns)}")


def undrawn(arms: pd.DataFrame, names: Iterable[str], kinds: Iterable[str], columns: list[str]) -> int:
    """How many arms of these kinds have a NaN where a number is drawn."""
    rows = arms[_among(arms, names, kinds)]
    return int((~_complete(rows, columns)).sum())


def _among(arms: pd.DataFrame, names: Iterable[str], kinds: Iterable[str]) -> Any:
    """Arms of these kinds and ways of matching, and those that belong to no matching."""
    kind = arms["arm"].isin(list(kinds))
    return kind & arms["match_on"].fillna("").isin(["", *names]) if "match_on" in arms else kind


def _complete(rows: pd.DataFrame, columns: list[str]) -> Any:
    return np.isfinite(rows[columns].astype(float).to_numpy()).all(axis=1)


def effect_panel(ax: Axes, rows: pd.DataFrame, measure: str, present: Sequence[str] | None = None) -> None:
    """One way of matching on given axes: the arms of ``present``, in this order."""
    present = [arm for arm in ARMS if (rows["arm"] == arm).any()] if present is None else list(present)
    means = rows.groupby(["item", "arm"])[measure].mean().unstack("arm").reindex(columns=present)
    answered: pd.Series[bool] = rows.groupby("item")["answered"].all().reindex(means.index)
    counted = answered if answered.any() else ~answered
    dark = set(counted.index[counted])
    ax.axhline(0, color="black", linewidth=0.8, zorder=1)
    places = dict(zip(means.index, _spread(len(means)), strict=True))
    for item, row in means.iterrows():
        at = np.flatnonzero(row.notna())
        alpha = max(0.25, 0.8 - 0.02 * len(means)) * (1.0 if item in dark else FAINT)
        ax.plot(at + places[item], row.iloc[at], color=GREY, linewidth=0.8, alpha=alpha, zorder=2, label=f"item {item}")
    for x, arm in enumerate(present):
        _points(ax, x, rows[rows["arm"] == arm], measure, places, counted)
        _mean(ax, x + 0.3, means.loc[counted, arm].dropna().to_numpy(float))
    ax.set_xticks(range(len(present)), [_tick(rows[rows["arm"] == arm], arm, counted) for arm in present], fontsize=8)
    ax.set_xlim(-0.4, len(present) - 0.2)
    ax.set_ylabel(MEASURES.get(measure, measure))


def _spread(n: int) -> np.ndarray[Any, Any]:
    """Offsets from −0.12 to 0.12, even whatever their number, and always alike."""
    return (np.arange(n) * GOLDEN % 1.0 - 0.5) * 0.24 if n > 1 else np.zeros(n)


def _points(ax: Axes, x: int, rows: pd.DataFrame, measure: str, places: Mapping[Any, float], counted: Any) -> None:
    """An item's only set sits on the item's line, several lie around it."""
    for dark in (False, True):
        mine = rows[rows["item"].map(counted) == dark]
        if mine.empty:
            continue
        look, sets = ARMS[str(mine["arm"].iloc[0])], mine.groupby("item")["item"]
        around = np.where(sets.transform("size") > 1, (sets.cumcount() * GOLDEN % 1.0 - 0.5) * 0.06, 0.0)
        marks = look.marks(1.0, len(rows)) | ({} if dark else {"markerfacecolor": "white"})
        said = f"{look.name}, {'counted' if dark else 'not answered'}"
        at = x + mine["item"].map(places).to_numpy(float) + around
        ax.plot(at, mine[measure], **marks, alpha=0.8 if dark else FAINT, zorder=3, label=said)


def _mean(ax: Axes, x: float, values: np.ndarray[Any, Any]) -> None:
    """The mean of one number an item, with its interval, in figures beside it."""
    if not values.size:
        return
    found = mean_interval(values)
    digits = 1 if abs(found.mean) >= 1 else 2 if abs(found.mean) >= 0.1 else 3
    text = signed(found.mean, digits)
    if np.isfinite([found.low, found.high]).all() and not found.degenerate:
        ax.plot([x, x], [found.low, found.high], color="black", linewidth=1.4, zorder=4)
        text += f"\n[{signed(found.low, digits)}, {signed(found.high, digits)}]"
    ax.plot(x, found.mean, "D", color="black", markersize=5, zorder=5, label="mean")
    box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    ax.annotate(text, (x, found.mean), (6, 0), textcoords="offset points", va="center", fontsize=8, bbox=box, zorder=4)


def _tick(rows: pd.DataFrame, arm: str, counted: Any) -> str:
    """Name, items and sets of the mean, items beside it, remedies."""
    if rows.empty:
        return f"{ARMS[arm].name}\nnone"
    inside = rows["item"].map(counted)
    n, beside = rows.loc[inside, "item"].nunique(), rows.loc[~inside, "item"].nunique()
    sets = f", {plural(int(inside.sum()), 'set')}" if inside.sum() > n else ""
    lines = [ARMS[arm].name, f"n = {plural(n, 'item')}{sets}"]
    lines += [f"(+ {beside} not answered)"] if beside else []
    if arm == "placebo" and "remedy" in rows:
        used = rows.drop_duplicates("item")["remedy"].value_counts()
        lines += [f"{name}: {plural(count, 'item')}" for name, count in used.items() if name]
    return "\n".join(lines)


def _title(match_on: str, rows: pd.DataFrame) -> str:
    """What placebos are matched on, and how many targets have none."""
    having = {arm: set(rows.loc[rows["arm"] == arm, "item"]) for arm in ("target", "placebo")}
    alone = len(having["target"] - having["placebo"])
    without = f"; {alone} of {plural(len(having['target']), 'target')} without a matched placebo" if alone else ""
    return f"placebos matched on {VARIABLES.get(match_on, match_on)}{without}"


def _said(row: Any) -> str:
    """A contrast in words: estimand, mean, interval, permutation p, n; without what is not known."""
    mean, low, high, p = (number(row.get(key)) for key in ("mean", "ci_low", "ci_high", "p_permutation"))
    text = f"{row.get('estimand') or 'contrast'}: {signed(mean) if np.isfinite(mean) else 'undefined'}"
    text += f" [{signed(low)}, {signed(high)}]" if np.isfinite(low + high) else ""
    text += f", permutation p = {p:.2g}" if np.isfinite(p) else ""
    n = number(row.get("n"))
    return text + (f", n = {plural(int(n), 'item')}" if np.isfinite(n) else "")


def number(value: Any) -> float:
    """A None that JSON made of NaN is NaN again."""
    return float("nan") if value is None else float(value)


def scale(axes: Sequence[Axes], measure: str) -> None:
    """One scale for axes that share y: to scale around 0 and logarithmic beyond for `LOGARITHMIC`."""
    if measure not in LOGARITHMIC:
        return
    linear = LOGARITHMIC[measure]
    low, high = (f(ax.dataLim.intervaly[end] for ax in axes) for end, f in ((0, min), (1, max)))
    for ax in axes:
        ax.axhspan(-linear, linear, color="#EBEBEB", zorder=0)
        ax.set_yscale("symlog", linthresh=linear, linscale=0.5)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
        ax.set_ylim(2 * low if low < -linear else -1.5 * linear, 2 * high if high > linear else 1.5 * linear)


def _note(frames: Sequence[pd.DataFrame], measure: str) -> str:
    """How to read the marks that occur."""
    answered = any(frame["answered"].any() for frame in frames)
    means = "answered items" if answered else "all items (the clean arm answers none)"
    linear = LOGARITHMIC.get(measure)
    single = all(frame["item"].nunique() == 1 for frame in frames)
    interval = "no interval, of one item" if single else "95 % interval, one number an item"
    band = f" Grey band (±{linear:g}): to scale, logarithmic outside." if linear else ""
    return (
        "Points: masked sets of tokens; grey lines: items, through the mean of an item's sets; diamonds: mean over "
        f"{means} [{interval}].{band}"
    )


def _handles(frames: Sequence[pd.DataFrame]) -> list[Any]:
    """Item lines and the mean; items that are not answered only where there are both kinds."""
    answered = {bool(value) for frame in frames for value in frame["answered"].unique()}
    handles = [Line2D([], [], color=GREY, linewidth=0.8, label="item" + " (clean answer right)" * (True in answered))]
    if answered == {True, False}:
        handles.append(Line2D([], [], color=GREY, linewidth=0.8, alpha=FAINT, label="item not answered: in no mean"))
    return [*handles, Line2D([], [], color="black", marker="D", markersize=5, linewidth=1.4, label="mean")]

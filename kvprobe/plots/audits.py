"""Audits as figures: the bounds beside what they bound, at once and layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from kvprobe.plots.assumption import assumption_map
from kvprobe.plots.style import GREY, Sheet, headline, sheet, styled
from kvprobe.plots.sweeps import sweep_curves
from kvprobe.plots.wording import about, over, per_cent

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Series = Mapping[str, tuple[str, str, str, bool]]
ALL: Series = {
    "actual": ("L, actual perturbation", "#000000", "o", True),
    "centred_bound": ("θ_c, centred bound", "#009E73", "D", True),
    "bound": ("θ, bound (Theorem 3.3)", "#0072B2", "s", True),
}
VALID: Series = {
    "bound_same_heads": ("θ of these heads only", "#0072B2", "s", False),
    "stage2_bound": ("θ̂, stage-2 bound (Theorem 3.5)", "#D55E00", "^", True),
    "previous_bound": ("previous: attention-only selection (Theorem C.1)", "#CC79A7", "v", False),
}
"""Column → name, colour, marker, filled; those of all heads, and those of heads with σ > ½."""
TIGHT = {"bound": ("θ ÷ L", "#0072B2", "s"), "centred": ("θ_c ÷ L", "#009E73", "D")}
STYLES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
GROUPS = 14
"""Groups of points that a panel of half the width has room for."""


def audit_figures(result: Any, summary: Mapping[str, Any]) -> dict[str, Sheet]:
    """All figures of ``kvprobe audit``: name of the file → figure.

    Parameters
    ----------
    result
        What :func:`kvprobe.audits.run` returns.
    summary
        Its summary with the ``model``.
    """
    rows = result.rows()
    figures = {
        "bounds": bounds_and_actual(rows, summary),
        "tightness_by_layer": tightness_by_layer(result.layer_rows(), summary),
        "assumption": assumption_map(result.sigmas(), rows, summary),
    }
    if result.sweeps is None:
        return figures
    for kind, sweeps in result.sweeps.groupby("sweep", sort=False):
        scores = None if result.scores is None else result.scores[result.scores["sweep"] == kind]
        figures[f"sweep_{kind}"] = sweep_curves(sweeps, scores, summary)
    return figures


@styled
def bounds_and_actual(rows: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """Actual perturbation and its bounds, in the manner of CriticalKV's Table 9.

    Averages of all heads and averages of the heads with σ > ½ are averages of different things: they stand in panels of
    their own.

    Parameters
    ----------
    rows
        One row a preset × base × cache × level (:meth:`kvprobe.audits.Result.rows`).
    """
    levels = list(dict.fromkeys(rows["level"]))
    wide = len(rows) // len(levels) > GROUPS
    grid = (2 * len(levels), 1) if wide else (len(levels), 2)
    figure = sheet(height=1.9 + 2.3 * grid[0])
    shares = rows["share_selected"]
    held = " to ".join(dict.fromkeys(per_cent(share) for share in (shares.min(), shares.max())))
    for place, level in enumerate(levels):
        mine, ax = rows[rows["level"] == level].reset_index(drop=True), None
        for side, (series, said) in enumerate(((ALL, "all heads"), (VALID, f"only heads with σ > ½ ({held} of all)"))):
            ax = figure.add_subplot(*grid, 2 * place + side + 1, sharey=ax)
            _groups(ax, mine, series)
            ax.set_title(f"by {level}, {said}")
            if wide or not side:
                ax.set_ylabel(f"change of a {level}'s output\n(L{summary['norm']} norm, log axis)")
    handles = [Line2D([], [], label=look[0], **_marks(*look[1:])) for look in (*ALL.values(), *VALID.values())]
    headline(
        figure,
        "How far the bounds lie above the actual perturbation",
        f"{about(summary)}. Averages under Algorithm 1 on the base named; previous: under the base itself.",
        f"a×: θ ÷ L; bars: intervals of θ ÷ L and θ_c ÷ L ({over(summary)}), times L. a %: θ̂ ÷ previous (no "
        "interval). By layer, bounds are sums over heads. Left and right average different heads: compare within "
        "a panel only.",
        handles,
        ncols=2,
    )
    return figure


def _marks(colour: str, marker: str, filled: bool) -> dict[str, Any]:
    face = colour if filled else "white"
    return {"color": colour, "marker": marker, "markersize": 5, "markerfacecolor": face, "linewidth": 0.7}


def _groups(ax: Axes, rows: pd.DataFrame, series: Series) -> None:
    """One place a base × preset × cache; lines run through the caches of one pair, and no further."""
    names = []
    for number, ((base, preset), mine) in enumerate(rows.groupby(["base", "preset"], sort=False)):
        at = np.asarray(mine.index, float)
        if number % 2:
            ax.axvspan(at[0] - 0.5, at[-1] + 0.5, color="#F2F2F2", zorder=0)
        for column, (_, colour, marker, filled) in series.items():
            ax.plot(at, mine[column], label=f"{column} {base} {preset}", **_marks(colour, marker, filled))
            _bars(ax, at, mine, column, colour)
        names.append((at.mean(), f"{base}\n{preset}"))
    crowded = len(rows) > 2 * GROUPS
    _ratios(ax, rows, "bound" if "bound" in series else "previous_bound", said=not crowded)
    _log(ax)
    ax.margins(y=0.12)
    ax.set_xticks(range(len(rows)), [per_cent(cache) for cache in rows["cache"]], fontsize=7, rotation=90 * crowded)
    ax.set_xlim(-0.6, len(rows) - 0.4)
    below = ax.secondary_xaxis(-0.2 if crowded else -0.09)
    below.set_xticks([at for at, _ in names], [name for _, name in names], fontsize=8)
    below.tick_params(length=0)
    below.spines["bottom"].set_visible(False)


def _bars(ax: Axes, at: np.ndarray[Any, Any], rows: pd.DataFrame, column: str, colour: str) -> None:
    """Interval of a bound's ratio to L, drawn at the mean L."""
    short = f"{column.removesuffix('_bound')}_over_actual"
    if short in rows:
        low, high = (rows[f"{short}_{end}"].to_numpy(float) * rows["actual"] for end in ("low", "high"))
        ax.vlines(at, low, high, colors=colour, linewidth=1.6, alpha=0.6)


def _ratios(ax: Axes, rows: pd.DataFrame, column: str, said: bool) -> None:
    """θ ÷ L or θ̂ ÷ previous above each point, where there is room; or why there are no points."""
    texts = [f"{v:.1f}×" for v in rows["bound_over_actual"]] if column == "bound" else map(_whole, rows["ratio"])
    if not np.isfinite(rows[column].to_numpy(float)).any():
        ax.text(0.5, 0.5, "no head has σ > ½: nothing to average", ha="center", transform=ax.transAxes)
        return
    for at, (value, text) in enumerate(zip(rows[column].astype(float), texts, strict=True)):
        if said and np.isfinite(value):
            ax.annotate(text, (at, value), (5, 5), textcoords="offset points", ha="center", fontsize=7)


def _whole(share: float) -> str:
    return f"{100 * share:.0f} %"


def _log(ax: Axes) -> None:
    """A logarithmic axis with plain numbers; a linear one where nothing is above 0 (nothing changes)."""
    if not any((np.asarray(line.get_ydata(), dtype=float) > 0).any() for line in ax.lines):
        return
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


@styled
def tightness_by_layer(layers: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """θ ÷ L and θ_c ÷ L of every layer: a row of panels a base, a column a cache; presets differ by the dashes.

    Parameters
    ----------
    layers
        One row a preset × base × cache × layer (:func:`kvprobe.audits.layer_rows`).
    """
    bases, caches, presets = (list(dict.fromkeys(layers[name])) for name in ("base", "cache", "preset"))
    figure = sheet(height=1.6 + 2.1 * len(bases))
    axes = figure.subplots(len(bases), len(caches), sharex=True, sharey=True, squeeze=False)
    for (row, column), ax in np.ndenumerate(axes):
        mine = layers[(layers["base"] == bases[row]) & (layers["cache"] == caches[column])]
        for preset, part in mine.groupby("preset", sort=False):
            _tightness(ax, part.sort_values("layer"), presets.index(preset))
        ax.axhline(1, color=GREY, linewidth=1, linestyle=":")
        ax.set_title(f"{bases[row]}+two_stage · cache {per_cent(caches[column])}")
        _tight_axes(ax, row == len(bases) - 1, column == 0)
    axes[0, 0].set_ylim(bottom=LOWEST)
    handles = [Line2D([], [], color=colour, marker=marker, label=name) for name, colour, marker in TIGHT.values()]
    handles += [Line2D([], [], color="black", label=preset, **_dashes(n)) for n, preset in enumerate(presets)]
    below = bool((layers[["bound_over_actual_low", "centred_over_actual_low"]] < LOWEST).any(axis=None))
    headline(
        figure,
        "How tight the bounds are, layer by layer",
        f"{about(summary)}. L: the layer's own summed change; θ, θ_c: sums over its heads.",
        f"Ratios of averages over documents under Algorithm 1; bands: {over(summary)}. Dotted, at 1: the bound is "
        "exact. Where changes of heads cancel in the layer, both ratios grow."
        + (" Bands that reach below the axis are of few documents: no ratio is below 1." if below else ""),
        handles,
        ncols=len(handles),
    )
    return figure


LOWEST = 0.8
"""Where the axis of ratios begins: none is below 1."""


def _dashes(number: int) -> dict[str, Any]:
    """What tells presets apart: dashes, and hollow marks of all but the first."""
    hollow = {"markerfacecolor": "white"} if number else {}
    return {"linestyle": STYLES[number % len(STYLES)], "linewidth": 1.1, **hollow}


def _tightness(ax: Axes, part: pd.DataFrame, number: int) -> None:
    x = part["layer"].to_numpy()
    for short, (_, colour, marker) in TIGHT.items():
        low, middle, high = (part[f"{short}_over_actual{end}"].to_numpy(float) for end in ("_low", "", "_high"))
        if np.isfinite(low).any():
            ax.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        every = max(1, len(x) // 10)
        ax.plot(x, middle, color=colour, marker=marker, markersize=3.5, markevery=every, **_dashes(number))


def _tight_axes(ax: Axes, last: bool, first: bool) -> None:
    _log(ax)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if last:
        ax.set_xlabel("layer")
    if first:
        ax.set_ylabel("bound ÷ actual (log axis)")

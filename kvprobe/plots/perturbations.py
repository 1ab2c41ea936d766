"""The panels of perturbation maps: a tidy table on an Axes each; :mod:`kvprobe.plots.maps` sets them side by side.

``base`` and ``ours`` are the two policies; *falls* means that ``ours`` perturbs less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.collections import EllipseCollection, LineCollection
from matplotlib.ticker import MaxNLocator, NullLocator

from kvprobe.plots.heads import AUROC, DASHED_CELLS
from kvprobe.plots.style import GREY, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.image import AxesImage

Floats = np.ndarray[Any, Any]

LEVEL = 0.05
"""Of Wilcoxon's test after Benjamini–Hochberg, as in :mod:`kvprobe.maps`."""
# Blue falls, orange rises. Light orange and light blue look alike in grey, so cells that rise get a dash, too.
FALLS = AUROC.reversed()
UNDEFINED = "#BFBFBF"
LIMITS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Where colours may end, in log2; the first one that covers ``COVERED`` of all heads is taken."""
COVERED = 0.98
NEAREST = 1 / 12
"""Ticks nearer than this share of the axis would print over each other; so would more than ``LABELS`` labels."""
LABELS = 11
MANY = 40
"""From this number of layers on, points get smaller."""
# Where both have the same value, the square stands inside the ring.
BASE: dict[str, Any] = {"color": "#0072B2", "marker": "o", "mfc": "none", "markersize": 6.5, "linestyle": (0, (4, 2))}
OURS: dict[str, Any] = {"color": "#D55E00", "marker": "s", "mfc": "#D55E00", "markersize": 3.4, "linestyle": "-"}
VERDICTS: dict[str, dict[str, Any]] = {
    "falls": {"color": "#08306B", "marker": "v", "mfc": "#08306B"},
    "rises": {"color": "#C46A00", "marker": "^", "mfc": "#C46A00"},
    "open": {"color": GREY, "marker": "o", "mfc": "white"},
}
"""Where the interval of a reduction lies: beyond zero, or around it (or there is none)."""


def limit_of(ratios: Floats) -> float:
    """Where colours end: the first of ``LIMITS`` that covers nearly all heads with a finite ratio."""
    sizes = np.sort(np.abs(ratios[np.isfinite(ratios)]))
    if not len(sizes):
        return LIMITS[0]
    reached = sizes[math.ceil(COVERED * len(sizes)) - 1]
    return next((limit for limit in LIMITS if reached <= limit), LIMITS[-1])


@styled
def ratio_map(ax: Axes, frame: pd.DataFrame, limit: float) -> AxesImage:
    """Layers from left to right, heads from top to bottom; colour is log2(L_ours / L_base), clipped at ±limit.

    Up to ``DASHED_CELLS`` heads, a dash marks those that rise and an open circle the significant ones (p_bh ≤ 0.05).
    """
    grid = np.full((int(frame["head"].max()) + 1, int(frame["layer"].max()) + 1), np.nan)
    grid[frame["head"], frame["layer"]] = frame["log2_ratio"].clip(-limit, limit)  # a head that rises from 0 is at inf
    look: dict[str, Any] = {"cmap": FALLS, "vmin": -limit, "vmax": limit, "aspect": "auto", "interpolation": "nearest"}
    image = ax.imshow(grid, **look)
    if len(frame) <= DASHED_CELLS:
        dashes = [[(layer - 0.2, head), (layer + 0.2, head)] for head, layer in np.argwhere(grid > 0)]
        ax.add_collection(LineCollection(dashes, colors="black", linewidths=0.7), autolim=False)
        _circle(ax, frame[significant(frame)], limit)
    whole_numbers(ax.xaxis, grid.shape[1])
    whole_numbers(ax.yaxis, grid.shape[0])
    ax.set(xlabel="layer", ylabel="head")
    return image


def _circle(ax: Axes, rows: pd.DataFrame, limit: float) -> None:
    """Open circles, so that the colour and the dash below stay in sight; white ones where the cell is dark."""
    size, angle = np.full(len(rows), 0.74), np.zeros(len(rows))
    edges = ["white" if dark else "black" for dark in rows["log2_ratio"] < -0.4 * limit]
    style: dict[str, Any] = {
        "facecolors": "none",
        "edgecolors": edges,
        "linewidths": 0.8,
        "offset_transform": ax.transData,
    }
    offsets = rows[["layer", "head"]].to_numpy(float)
    ax.add_collection(EllipseCollection(size, size, angle, units="xy", offsets=offsets, **style), autolim=False)


def significant(frame: pd.DataFrame) -> pd.Series[bool]:
    """Which heads differ after Benjamini–Hochberg."""
    return frame["p_bh"] <= LEVEL


@styled
def ratio_curve(ax: Axes, frame: pd.DataFrame, found: Mapping[str, Any], limit: float) -> None:
    """Share of all heads at or below each ratio; at 0 the share that falls (``share``, ``ci_low``, ``ci_high``)."""
    ratios = np.sort(frame["log2_ratio"].dropna())
    x = np.concatenate([[-limit], ratios[np.abs(ratios) < limit], [limit]])
    y = 100 * np.searchsorted(ratios, x, side="right") / len(frame)
    ax.axvline(0, color=GREY, linewidth=0.8, zorder=0)
    ax.axhline(50, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
    ax.plot(x, y, drawstyle="steps-post", color="black", linewidth=1.2, label="heads")
    low, high = (np.array([100 * number(found.get(name))]) for name in ("ci_low", "ci_high"))
    bars(ax, np.zeros(1), low, high, OURS["color"], 2.0)
    for end in (*low[np.isfinite(low)], *high[np.isfinite(high)]):
        ax.plot([0], [end], color=OURS["color"], marker="_", markersize=9, markeredgewidth=1.5, label="_cap")
    ax.plot([0], [100 * found["share"]], **OURS, zorder=4, label="share")
    ax.set(xlim=(-limit, limit), ylim=(-3, 103), xlabel="log2 ratio", ylabel="heads at or below (%)")


@styled
def absolutes(ax: Axes, frame: pd.DataFrame, names: Sequence[str]) -> None:
    """Perturbation of every layer under both policies, on a logarithmic axis; 0 has no place there."""
    for column, name, look in (("base", names[0], BASE), ("ours", names[1], OURS)):
        size = look["markersize"] * _shrunk(frame)
        ax.plot(frame["layer"], frame[column].where(frame[column] > 0), **look | {"markersize": size}, label=name)
    if (frame[["base", "ours"]] > 0).any(axis=None):
        ax.set_yscale("log")


@styled
def reductions(ax: Axes, x: Floats, frame: pd.DataFrame, *, relative: bool = False) -> None:
    """Reduction of every row with its interval, marked by where that lies, and a line at zero.

    ``relative``: reduction and interval in per cent of the row's ``base``, which is taken as known.
    """
    kinds = verdicts(frame)
    scale = 100 / frame["base"].where(frame["base"] > 0).to_numpy(float) if relative else 1.0
    y, low, high = (frame[name].to_numpy(float) * scale for name in ("reduction", "ci_low", "ci_high"))
    ax.axhline(0, color="black", linewidth=0.8, zorder=1)
    for name, look in VERDICTS.items():
        mine = kinds == name
        bars(ax, x[mine], low[mine], high[mine], look["color"])
        ax.plot(x[mine], y[mine], linestyle="none", markersize=5 * _shrunk(frame), **look, label=name)


def verdicts(frame: pd.DataFrame) -> Floats:
    """Name in ``VERDICTS`` of each row's ``ci_low`` … ``ci_high``."""
    return np.select([frame["ci_low"] > 0, frame["ci_high"] < 0], ["falls", "rises"], "open")


@styled
def means(ax: Axes, x: Floats, frame: pd.DataFrame, names: Sequence[str]) -> None:
    """Mean L of both policies."""
    ax.plot(x, frame["base"], **BASE, label=names[0])
    ax.plot(x, frame["ours"], **OURS, label=names[1])


@styled
def shares(ax: Axes, x: Floats, frame: pd.DataFrame) -> None:
    """Share of heads reduced, with its interval and a line at one half."""
    low, y, high = (100 * frame[name].to_numpy(float) for name in ("heads_low", "heads_reduced", "heads_high"))
    ax.axhline(50, color="black", linewidth=0.8, zorder=1)
    bars(ax, x, low, high, GREY)
    ax.plot(x, y, color="black", marker="D", markersize=4.5, linewidth=1.2, label="heads reduced")
    ax.set(ylim=(-3, 103), ylabel="heads reduced (%)")


def cache_axis(ax: Axes, caches: Sequence[float]) -> dict[float, float]:
    """Set up the axis for these sizes, in ascending order; where each one stands."""
    at = np.log2(caches)
    gaps, skip = np.diff(at), -(-len(at) // LABELS)
    even = len(caches) > 2 and gaps.min() < NEAREST * gaps.sum()
    at = np.arange(len(caches)) if even else at
    pad = 0.3 * (float(np.diff(at).min()) if len(gaps) else 1.0)
    ax.set_xlim(at[0] - pad, at[-1] + pad)
    ax.set_xticks(at, labels=["" if place % skip else f"{100 * cache:.6g}" for place, cache in enumerate(caches)])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(f"cache kept (%, {'steps not to scale' if even else 'log scale'})")
    return dict(zip(caches, at.tolist(), strict=True))


def whole_numbers(axis: Axis, count: int) -> None:
    """Ticks at whole numbers, of which there are ``count``."""
    axis.set_major_locator(MaxNLocator(nbins=min(count, 9), integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def bars(ax: Axes, x: Floats, low: Floats, high: Floats, colour: str, width: float = 1.0) -> None:
    """Upright bars; none where an end is missing."""
    known = np.isfinite(low) & np.isfinite(high)
    ax.vlines(x[known], low[known], high[known], colors=colour, linewidth=width, zorder=2)


def number(value: Any) -> float:
    """NaN for None, which is what it becomes in a JSON file."""
    return math.nan if value is None else float(value)


def _shrunk(frame: pd.DataFrame) -> float:
    return float(min(1.0, (MANY / len(frame)) ** 0.5))

"""Layer × head maps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.collections import EllipseCollection, LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from kvprobe.errors import StatisticsError
from kvprobe.plots.style import plural, styled

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

# Orange below, blue above; the low end stays lighter than the high end, so that a dark cell is a high one in grey, too.
_ENDS = ["#C46A00", "#F0A640", "#F7F7F7", "#5B9BCB", "#08306B"]
AUROC = LinearSegmentedColormap.from_list("auroc", _ENDS).with_extremes(bad="#BFBFBF")
DASHED_CELLS = 2000
"""Up to this many cells, those below the centre get a dash."""


@styled
def head_map(
    ax: Axes,
    frame: pd.DataFrame,
    value: str = "auroc",
    *,
    centre: float = 0.5,
    reach: float = 0.5,
    level: float = 0.05,
    title: str = "",
) -> AxesImage:
    """Heat map with layers from left to right and heads from top to bottom.

    Parameters
    ----------
    frame
        One row a head: ``layer``, ``head``, ``value`` and, where known, ``p_max_t`` (a circle marks p < ``level``),
        ``excluded`` (hatched), ``items_at_1``, ``n_items``, ``p_attainable`` (the smallest p that the design allows).
    centre, reach
        Colours run from ``centre − reach`` to ``centre + reach``; white is ``centre``. NaN is grey.
    title
        First line above the map; the second says how many heads are significant, or that none could be.

    Raises
    ------
    StatisticsError
        No rows, or several rows of one head: the table still holds several contrasts, places or features.
    """
    grid = _grid(frame, value)
    image = ax.imshow(
        grid, cmap=AUROC, vmin=centre - reach, vmax=centre + reach, aspect="auto", interpolation="nearest"
    )
    if grid.size <= DASHED_CELLS:
        _dash(ax, grid < centre)
    _circle(ax, _significant(frame, level), 0.8 if grid.size <= DASHED_CELLS else 0.3)
    _hatch(ax, frame)
    for axis, number in ((ax.xaxis, grid.shape[1]), (ax.yaxis, grid.shape[0])):
        axis.set_major_locator(MaxNLocator(nbins=min(number, 9), integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    ax.set(xlabel="layer", ylabel="head")
    ax.set_title("\n".join(line for line in (title, significance(frame, level)) if line))
    return image


def significance(frame: pd.DataFrame, level: float = 0.05) -> str:
    """How many heads are significant by max-T; if none, whether any could have been.

    Heads of excluded layers do not count. Empty without p-values.
    """
    frame = _kept(frame)
    if "p_max_t" not in frame or frame["p_max_t"].isna().all():
        return ""
    found, smallest = len(_significant(frame, level)), frame["p_max_t"].min()
    if found:
        return f"{found} of {plural(len(frame), 'head')} significant: p < {level:g}"
    items = plural(int(frame["n_items"].max()), "item") if "n_items" in frame else "these items"
    attainable = float(frame["p_attainable"].max()) if "p_attainable" in frame else 0.0
    if attainable >= level:
        return f"no head could be significant: with {items}, p is at least {_p(attainable)}"
    if "items_at_1" in frame and (perfect := frame[frame["items_at_1"] == frame["n_items"]]).size:
        return f"none significant: with {items}, AUROC 1 has p = {_p(perfect['p_max_t'].min())}"
    return f"none significant: with {items}, smallest p = {_p(smallest)}"


def legend_handles(frames: Sequence[pd.DataFrame], value: str = "auroc", level: float = 0.05) -> list[Artist]:
    """Explain the marks that occur in these maps, and no others."""

    def mark(marker: str, label: str) -> Line2D:
        return Line2D([], [], linestyle="none", marker=marker, mfc="white", mec="black", label=label)

    handles: list[Artist] = []
    if any(len(_significant(frame, level)) for frame in frames):
        handles.append(mark("o", f"p < {level:g} (max-T over heads, two-sided)"))
    if any(len(frame) <= DASHED_CELLS and (frame[value] < 0.5).any() for frame in frames):
        handles.append(mark("_", "below 0.5"))
    if any("excluded" in frame and frame["excluded"].any() for frame in frames):
        handles.append(Patch(facecolor="none", edgecolor="black", hatch="////", label="layer excluded beforehand"))
    if any(frame[value].isna().any() for frame in frames):
        handles.append(Patch(facecolor="#BFBFBF", label="undefined"))
    return handles


def _p(value: float) -> str:
    return f"{value:.3f}"


def _grid(frame: pd.DataFrame, value: str) -> np.ndarray[Any, Any]:
    """[heads, layers]; NaN where the table has no row."""
    if frame.empty or frame.duplicated(["layer", "head"]).any():
        heads = len(frame[["layer", "head"]].drop_duplicates())
        raise StatisticsError(
            f"a head map needs one row a head, but {len(frame)} rows hold {plural(heads, 'head')}: "
            "choose one contrast, where and feature"
        )
    grid = np.full((int(frame["head"].max()) + 1, int(frame["layer"].max()) + 1), np.nan)
    grid[frame["head"], frame["layer"]] = frame[value]
    return grid


def _kept(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[~frame["excluded"].astype(bool)] if "excluded" in frame else frame


def _significant(frame: pd.DataFrame, level: float) -> pd.DataFrame:
    kept = _kept(frame)
    return kept[kept["p_max_t"] < level] if "p_max_t" in kept else kept.iloc[:0]


def _dash(ax: Axes, below: np.ndarray[Any, Any]) -> None:
    """A dash in each cell below the centre: in grey, light orange and light blue look alike."""
    segments = [[(layer - 0.22, head), (layer + 0.22, head)] for head, layer in np.argwhere(below)]
    ax.add_collection(LineCollection(segments, colors="black", linewidths=0.6), autolim=False)


def _circle(ax: Axes, rows: pd.DataFrame, edge: float) -> None:
    """Circles of half a cell, whatever the size of the cells."""
    size, angle = np.full(len(rows), 0.55), np.zeros(len(rows))
    style = {"facecolors": "white", "edgecolors": "black", "linewidths": edge, "offset_transform": ax.transData}
    offsets = rows[["layer", "head"]].to_numpy(float)
    ax.add_collection(EllipseCollection(size, size, angle, units="xy", offsets=offsets, **style), autolim=False)


def _hatch(ax: Axes, frame: pd.DataFrame) -> None:
    if "excluded" in frame:
        for layer in sorted(frame.loc[frame["excluded"].astype(bool), "layer"].unique()):
            ax.axvspan(layer - 0.5, layer + 0.5, facecolor="none", edgecolor="black", hatch="////", linewidth=0)

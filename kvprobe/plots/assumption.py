"""Maps of the first stage's mass, for Assumption 3.4."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from kvprobe.plots.style import WIDTH, Sheet, headline, plural, sheet, styled
from kvprobe.plots.wording import about, over, per_cent

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

READINGS = {"selected": ("sigma", "set selected"), "oracle": ("sigma_oracle", "best set")}
CROSSED = 2000
"""Up to this many cells, crosses have a rim."""


@styled
def assumption_map(sigmas: pd.DataFrame, rows: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """Layer × head maps of the first stage's mass σ, for both readings of Assumption 3.4 (CriticalKV's Figure 8).

    A head whose mean σ is at most ½ has a white cross. Maps that agree between presets are drawn once.

    Parameters
    ----------
    sigmas
        ``preset``, ``base``, ``cache``, ``layer``, ``head``, ``sigma``, ``sigma_oracle``: one row a head, or one a
        document and head.
    rows
        The shares with σ > ½ and their intervals (:meth:`kvprobe.audits.Result.rows`).
    """
    caches = sorted(set(rows["cache"]))
    panels = _panels(sigmas, caches)
    heads = max(len(grid) for grids in panels.values() for grid in grids)
    figure = sheet(height=1.5 + len(panels) * (0.75 + min(3.0, max(0.9, 0.045 * heads))))
    axes = figure.subplots(len(panels), len(caches), sharex=True, sharey=True, squeeze=False)
    for line, ((base, presets, reading), grids) in zip(axes, panels.items(), strict=True):
        for ax, cache, grid in zip(line, caches, grids, strict=True):
            image = ax.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
            _cross(ax, _fails(grid))
            row = rows[(rows["base"] == base) & (rows["preset"] == presets[0]) & (rows["cache"] == cache)].iloc[0]
            title = f"{base}, {' + '.join(presets)}: {READINGS[reading][1]}, {per_cent(cache)}"
            chars = int(16 * (WIDTH - 1) / len(caches))
            lines = textwrap.wrap(title, chars) + textwrap.wrap(_held(row, reading, grid), chars)
            ax.set_title("\n".join(lines), fontsize=8)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
            ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    for ax in axes[-1]:
        ax.set_xlabel("layer")
    for ax in axes[:, 0]:
        ax.set_ylabel("head")
    figure.colorbar(image, ax=axes, label="mean σ over documents", fraction=0.02, aspect=40, shrink=0.8)
    failing = any(_fails(grid).any() for grids in panels.values() for grid in grids)
    look: dict[str, Any] = {"marker": "X", "markersize": 8, "markerfacecolor": "white", "markeredgecolor": "black"}
    mark = Line2D([], [], linestyle="none", label="mean σ of the head is ½ or less: it fails", **look)
    headline(
        figure,
        "Assumption 3.4: does the first stage hold more than half of the attention?",
        f"{about(summary)}. {plural(panels[next(iter(panels))][0].size, 'head')}; caches in per cent.",
        f"σ: attention of the probe row in the first stage of Algorithm 1, question included: of the set that "
        "the policy selected, or of the row's own best set of that size. Shares: of heads × documents, with σ > ½ "
        f"[{over(summary)}]. " + ("" if failing else "No head's mean σ is ½ or less."),
        [mark] if failing else [],
    )
    return figure


def _panels(sigmas: pd.DataFrame, caches: list[float]) -> dict[Any, list[np.ndarray[Any, Any]]]:
    """(base, presets, reading) → [heads, layers] at every cache."""
    found: dict[Any, list[np.ndarray[Any, Any]]] = {}
    for reading, (column, _) in READINGS.items():
        for (base, preset), mine in sigmas.groupby(["base", "preset"], sort=False):
            means = mine.groupby(["cache", "head", "layer"])[column].mean()
            grids = [means[cache].unstack("layer").to_numpy(float) for cache in caches]
            for same in [key for key in found if key[0] == base and key[2] == reading]:
                if all(np.array_equal(a, b, equal_nan=True) for a, b in zip(grids, found[same], strict=True)):
                    found[base, (*same[1], preset), reading] = found.pop(same)
                    break
            else:
                found[base, (preset,), reading] = grids
    return dict(sorted(found.items(), key=lambda item: list(dict.fromkeys(sigmas["base"])).index(item[0][0])))


def _fails(grid: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Theorem 3.5 needs σ > ½; at ½ its factor 2 − 1/σ is zero already."""
    return grid <= 0.5


def _cross(ax: Axes, failing: np.ndarray[Any, Any]) -> None:
    """A white cross with a dark rim over each failing head, of the size of its cell."""
    at = np.argwhere(failing)[:, ::-1]
    lines = [[(x - 0.35, y - turn), (x + 0.35, y + turn)] for x, y in at for turn in (0.35, -0.35)]
    for colour, width in (("black", 1.8), ("white", 0.9)) if failing.size <= CROSSED else (("white", 0.5),):
        ax.add_collection(LineCollection(lines, colors=colour, linewidths=width), autolim=False)


def _held(row: Any, reading: str, grid: np.ndarray[Any, Any]) -> str:
    share, low, high = (row[f"share_{reading}{end}"] for end in ("", "_low", "_high"))
    failing = int(_fails(grid).sum())
    ends = f" [{100 * low:.1f}, {100 * high:.1f}]" if np.isfinite(float(low)) else ""
    return f"σ > ½: {100 * share:.1f} %{ends}; {plural(failing, 'head')} fail{'s' if failing == 1 else ''}"

"""Attention mass of spans against their value mass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator, NullFormatter

from kvprobe.plots.style import GREY, LOOKS, Look, plural, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

READING = "Both high: re-read.\nHigh mass, low value mass: sink-like."


def span_means(spans: pd.DataFrame, where: str = "last") -> pd.DataFrame:
    """One row a span: ``mass`` and ``value_mass`` at one place, mean over layers × heads (and over answer tokens).

    Parameters
    ----------
    spans
        Rows of layer × head × observation point × span.
    where
        An observation point (``last``, ``context_end``) or a group of them (``answer`` for ``answer_0``, …).
    """
    places = [at for at in spans["where"].unique() if at == where or at.startswith(f"{where}_")]
    rows = spans[spans["where"].isin(places)]
    return rows.groupby(["item", "label", "start", "stop"], sort=True)[["mass", "value_mass"]].mean().reset_index()


@styled
def mass_against_value_mass(ax: Axes, spans: pd.DataFrame, where: str = "last", *, p: int = 1, title: str = "") -> None:
    """One point a span on logarithmic axes, one large point a class (its medians).

    mass = Σ_{t ∈ S} A_t, value mass = Σ_{t ∈ S} A_t ‖v_t W_O‖_p, both means over layers × heads. The dashed line has
    the median ratio of haystack spans (of all spans, where there are none): above it, attention brings more output.

    Parameters
    ----------
    spans
        See :func:`span_means`. A span without any mass has no place on a logarithmic axis and is counted in a note.
    p
        Norm that the value mass was measured with.
    """
    points = span_means(spans, where)
    seen = points[(points["mass"] > 0) & (points["value_mass"] > 0)]
    ax.set(xscale="log", yscale="log")
    for order, label in enumerate(reversed(LOOKS)):
        _class(ax, seen[seen["label"] == label], label, order)
    if len(seen):
        _typical(ax, seen)
        _ticks(ax.xaxis)
        _ticks(ax.yaxis)
    if hidden := len(points) - len(seen):
        text = f"not drawn: {plural(hidden, 'span')} without attention"
        ax.text(0.98, 0.03, text, transform=ax.transAxes, ha="right", fontsize=8)
    box = {"boxstyle": "round", "facecolor": "white", "edgecolor": GREY, "alpha": 0.85, "linewidth": 0.6}
    ax.text(0.02, 0.97, READING, transform=ax.transAxes, va="top", fontsize=8, bbox=box, zorder=1)
    ax.set_xlabel(r"attention mass $\Sigma_{t\in S}\,A_t$ (share of a head's attention)")
    ax.set_ylabel(rf"value mass $\Sigma_{{t\in S}}\,A_t\,\Vert v_t W_O\Vert_{p}$ (size of its output)")
    ax.set_title(title)


def legend_handles(spans: pd.DataFrame) -> list[Any]:
    """The classes that occur, with the number of their spans, and what large points are."""
    counts = spans.drop_duplicates(["item", "label", "start", "stop"])["label"].value_counts()
    handles = [
        Line2D([], [], **look.marks(), label=f"{look.name}, n = {counts[label]}")
        for label, look in LOOKS.items()
        if label in counts
    ]
    median = Look("large, black edge: median of the class", "black", "o", 9, filled=False)
    handles.append(Line2D([], [], **median.marks(), label=median.name))
    typical = f"{'haystack text' if 'distractor' in counts else 'all spans'}: median value mass per attention mass"
    return [*handles, Line2D([], [], color=GREY, linestyle="--", label=typical)]


def _class(ax: Axes, rows: pd.DataFrame, label: str, order: int) -> None:
    """Points, and above all points the median; a single point is its own median and not hidden by others'."""
    look = LOOKS[label]
    above = 2 + order + (len(LOOKS) if len(rows) == 1 else 0)
    ax.plot(rows["mass"], rows["value_mass"], **look.marks(0.8, len(rows)), label=label, alpha=0.75, zorder=above)
    if len(rows) > 1:
        median = rows[["mass", "value_mass"]].median()
        face = {"markerfacecolor": look.colour if look.filled else "white", "markeredgecolor": "black"}
        order += 2 + len(LOOKS)
        ax.plot(*median, **look.marks(1.5) | face, markeredgewidth=1.2, zorder=order, label=f"{label} median")


def _typical(ax: Axes, points: pd.DataFrame) -> None:
    """Line of constant value mass per mass, anchored where points are: the axes grow for points only."""
    plain = points[points["label"] == "distractor"]
    rows = plain if len(plain) else points
    ratio = float((rows["value_mass"] / rows["mass"]).median())
    near = float(rows["mass"].median())
    anchors = [(near * step, ratio * near * step) for step in (1.0, 1.001)]
    ax.axline(*anchors, color=GREY, linestyle="--", linewidth=0.8, zorder=0)


def _ticks(axis: Axis) -> None:
    axis.set_major_locator(_Decades())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


class _Decades(Locator):
    """Ticks at 1, 2, 5 of each decade in view, at 1 where there are many: matplotlib's own labels may overlap."""

    def __call__(self) -> Sequence[float]:
        assert self.axis is not None
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        """Positions between two positive limits; three or so round numbers where that is less than one step."""
        low, high = np.log10(vmin), np.log10(vmax)
        steps = (1, 2, 5) if high - low < 2.5 else (1,)
        powers = range(math.floor(low), math.ceil(high) + 1)
        ticks = [tick for power in powers for step in steps if vmin <= (tick := step * 10.0**power) <= vmax]
        return ticks if len(ticks) > 1 else MaxNLocator(3).tick_values(vmin, vmax)

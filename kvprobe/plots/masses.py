"""Attention mass of spans against their value mass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D

from kvprobe.plots.style import GREY, LOOKS, plural, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

READING = "both high: re-read\nhigh mass, low value mass: sink-like"


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

    mass = Σ_{t ∈ S} A_t, value mass = Σ_{t ∈ S} A_t ‖v_t W_O‖_p, both means over layers × heads. The dashed line has the
    median ratio of haystack spans: a span above it gives more output per attention than ordinary text.

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
    for label in reversed(LOOKS):
        _class(ax, seen[seen["label"] == label], label)
    if len(seen):
        _typical(ax, seen)
    if hidden := len(points) - len(seen):
        ax.text(0.02, 0.98, f"not drawn: {plural(hidden, 'span')} without attention", transform=ax.transAxes, va="top")
    box = {"boxstyle": "round", "facecolor": "white", "edgecolor": GREY, "alpha": 0.85, "linewidth": 0.6}
    ax.text(0.98, 0.03, READING, transform=ax.transAxes, ha="right", va="bottom", fontsize=8, bbox=box, zorder=1)
    ax.set(xlabel="attention mass (share of a head's attention)", ylabel=f"value mass Σ A·‖v W_O‖{'₁₂'[p - 1]} (output units)")
    ax.set_title(title)


def legend_handles(spans: pd.DataFrame) -> list[Any]:
    """The classes that occur, with the number of their spans, and what large points are."""
    counts = spans.drop_duplicates(["item", "label", "start", "stop"])["label"].value_counts()
    handles = [
        Line2D([], [], **look.marks(), label=f"{look.name}, n = {counts[label]}")
        for label, look in LOOKS.items()
        if label in counts
    ]
    median = {"linestyle": "none", "marker": "o", "markersize": 9, "markerfacecolor": "white", "markeredgecolor": "black"}
    handles.append(Line2D([], [], **median, label="large, black edge: median"))
    return [*handles, Line2D([], [], color=GREY, linestyle="--", label="typical value of haystack text")]


def _class(ax: Axes, rows: pd.DataFrame, label: str) -> None:
    look = LOOKS[label]
    ax.plot(rows["mass"], rows["value_mass"], **look.marks(0.8), label=label, alpha=0.75)
    if len(rows) > 1:
        edge = {"markeredgecolor": "black", "markeredgewidth": 1.2, "zorder": 4}
        face = {"markerfacecolor": look.colour if look.filled else "white"}
        ax.plot(rows["mass"].median(), rows["value_mass"].median(), **look.marks(1.7) | edge | face, label=f"{label} median")


def _typical(ax: Axes, points: pd.DataFrame) -> None:
    """Line of constant value mass per mass; the axes keep the limits that the points ask for."""
    plain = points[points["label"] == "distractor"]
    rows = plain if len(plain) else points
    ratio = float((rows["value_mass"] / rows["mass"]).median())
    ax.axline((1.0, ratio), (10.0, 10.0 * ratio), color=GREY, linestyle="--", linewidth=0.8, zorder=0)

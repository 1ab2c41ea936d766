"""Task score against cache budget, policy by policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.plots.style import GREY, Sheet, headline, plural, sheet, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

STAGE = "+two_stage"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*", ">")
"""As many as have no common divisor with the colours: families repeat after seventy, not after ten."""
NEAREST = 1 / 20
"""Ticks nearer than this share of the axis would print over each other."""
CLUSTER = 0.36
"""Share of the distance between two sizes that the points of one size may take, side by side."""
STEP = 0.06
"""Most of that distance between two points of one size."""


@styled
def score_curves(ax: Axes, rows: pd.DataFrame, full: Mapping[str, Any] | None = None) -> list[Any]:
    """Mean score of every policy at every cache size, with its interval; returns the legend's handles.

    A policy and the same one with a second stage share colour and marker: dashed and hollow without, solid and filled
    with it. Points of one size stand side by side, so that intervals do not hide each other. Sizes that lie too near
    each other for their labels are drawn in even steps, and the axis says so.

    Parameters
    ----------
    rows
        One row a policy × cache: ``policy``, ``cache``, ``score``, ``ci_low``, ``ci_high``.
    full
        ``score``, ``ci_low``, ``ci_high`` of the whole cache: a line with its band.
    """
    policies = list(dict.fromkeys(rows["policy"]))
    families = list(dict.fromkeys(policy.removesuffix(STAGE) for policy in policies))
    staged = {policy.removesuffix(STAGE) for policy in policies if policy.endswith(STAGE)}
    places, gap = _axis(ax, sorted(set(rows["cache"])))
    step = gap * min(STEP, CLUSTER / len(policies))
    handles = []
    for place, policy in enumerate(policies):
        family = policy.removesuffix(STAGE)
        look = _look(families.index(family), policy.endswith(STAGE) or family not in staged)
        mine = rows[rows["policy"] == policy].sort_values("cache")
        x = np.array([places[cache] for cache in mine["cache"]]) + step * (place - (len(policies) - 1) / 2)
        score, ends = mine["score"].to_numpy(float), mine[["ci_low", "ci_high"]].to_numpy(float).T
        ax.errorbar(x, score, yerr=np.abs(ends - score), fmt="none", ecolor=look["color"], elinewidth=0.8, alpha=0.45)
        handles += ax.plot(x, score, label=policy, **look)
    return handles if full is None else [*handles, _full(ax, full)]


def _look(number: int, solid: bool) -> dict[str, Any]:
    colour = COLOURS[number % len(COLOURS)]
    return {
        "color": colour,
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 5,
        "markerfacecolor": colour if solid else "white",
        "linestyle": "-" if solid else (0, (4, 2)),
        "linewidth": 1.3,
    }


def _full(ax: Axes, full: Mapping[str, Any]) -> Any:
    low, high = full["ci_low"], full["ci_high"]
    if low is not None and low == low:
        ax.axhspan(low, high, color="#EBEBEB", zorder=0)
    return ax.axhline(full["score"], color=GREY, linewidth=1.2, linestyle=":", zorder=1, label="full cache")


def _axis(ax: Axes, caches: Sequence[float]) -> tuple[dict[float, float], float]:
    """Set up both axes; where each size stands, and the least distance between two."""
    gaps = np.diff(caches)
    even = len(caches) > 2 and gaps.min() < NEAREST * gaps.sum()
    places = {cache: float(number if even else cache) for number, cache in enumerate(caches)}
    gap = 1.0 if even else float(gaps.min()) if len(gaps) else 0.1
    at = list(places.values())
    ax.set_xticks(at, labels=[f"{100 * cache:.6g} %" for cache in caches])
    ax.set_xlim(at[0] - 0.6 * gap, at[-1] + 0.6 * gap)
    ax.set_ylim(-0.03, 1.05)
    ax.set(xlabel="cache asked for" + (" (steps not to scale)" if even else ""), ylabel="task score")
    return places, gap


@styled
def score_against_cache(rows: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """The figure of ``kvprobe evict``, in the manner of CriticalKV's Figure 2."""
    figure = sheet(height=5.0)
    handles = score_curves(figure.add_subplot(), rows, summary["full"])
    headline(
        figure,
        f"{summary['task']}: score against cache budget",
        f"{summary['model']}, {plural(summary['n_items'], 'item')} of {summary['length']} tokens, "
        f"seed {summary['seed']}. {_asked(summary['setting'])}",
        "Mean over items with its 95 % interval (t or BCa; Clopper–Pearson where all items agree); dotted: full cache, "
        f"grey its interval. {summary['semantics']}.",
        handles,
        ncols=_columns([handle.get_label() for handle in handles]),
    )
    return figure


def _columns(labels: Sequence[str]) -> int:
    """Columns of a legend that is filled column by column: two rows, where the names leave room for it."""
    room = int(150 / (max(map(len, labels)) + 8))
    return max(1, min(room, -(-len(labels) // 2)))


def _asked(setting: str) -> str:
    if setting == "context":
        return "The question is unseen when the cache is compressed."
    return "The question is compressed together with the context."

"""The figure of head_roles, drawn from its tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from needle_items import subtitle

from kvprobe.plots import headline, sheet
from kvprobe.plots.style import GREY, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

BLUE, ORANGE = "#0072B2", "#D55E00"
NAMED = 8
"""Heads with a label: those of the largest retrieval scores."""
LINEAR = 0.01


@styled
def head_roles(df: pd.DataFrame, quantities: Mapping[str, str]) -> Figure:
    """Heads on the plane of sink rate and retrieval score; rank correlations of all pairs; measured effects if any."""
    about, pairs = df.attrs["about"], df.attrs["tables"]["pairs"]
    knocked = "effect" in df
    figure = sheet(9.8, 8.4 if knocked else 6.6)
    grid = figure.add_gridspec(2, 2 if knocked else 1, height_ratios=(1.5, 1.2 if knocked else 0.8))
    _plane(figure.add_subplot(grid[0, :]), df, about)
    _pairs(figure.add_subplot(grid[1, 0]), pairs, quantities)
    if knocked:
        _effects(figure.add_subplot(grid[1, 1]), df)
    headline(
        figure,
        "Attention on the first position, copying, and effect of the evidence, head by head",
        subtitle(about),
        _note(about),
    )
    return figure


def _note(about: Mapping[str, Any]) -> str:
    return (
        f"Retrieval score: {about['answered_trials']} of {about['trials']} trials of other items were answered; scale "
        f"linear below {LINEAR:g}. Mass and L: means over question and answer rows and over items. L: change of the "
        f"head's own output when the evidence is cut in it alone, closed form, L{about['norm']} norm behind W_O; its "
        "values grow with depth. Dotted: sink head, copying head. Below: Spearman over heads within an item, mean over "
        "items, 95 % (the retrieval score held fixed); open: over the heads of one layer. Exploratory."
        + (" Right: dotted at 1e-5 nats, where float32 rounds." if about["knockouts"] else "")
    )


def _plane(ax: Any, df: pd.DataFrame, about: Mapping[str, Any]) -> None:
    from matplotlib.colors import LogNorm

    rows = df.sort_values("perturbation")
    L = rows["perturbation"].to_numpy(float)
    top = float(L.max()) or 1.0
    low = max(float(L[L > 0].min()) if (L > 0).any() else top / 10, top * 1e-4)
    points = ax.scatter(
        rows["first"],
        rows["retrieval"],
        s=10 + 240 * L / top,
        c=L.clip(low, None),
        cmap="viridis_r",
        norm=LogNorm(low, top) if low < top else None,
        edgecolors="black",
        linewidths=0.4,
        alpha=0.85,
    )
    ax.figure.colorbar(points, ax=ax, pad=0.01, fraction=0.05, label="exact L of cutting the evidence")
    ax.axvline(about["sink"], color="black", linewidth=0.8, linestyle=":")
    ax.axhline(about["copy"], color="black", linewidth=0.8, linestyle=":")
    best = df[df["retrieval"] > 0].sort_values("retrieval", ascending=False, kind="stable").head(NAMED)
    for row, right in zip(best.to_dict("records"), _sides(best), strict=True):
        text, at = f"{row['layer']}.{row['head']}", (row["first"], row["retrieval"])
        side = ((6, 6), "left") if right else ((-6, 6), "right")
        ax.annotate(text, at, side[0], textcoords="offset points", fontsize=8, ha=side[1])
    ax.set_yscale("symlog", linthresh=LINEAR)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    reach = max(0.2, float(df["retrieval"].max()))
    ax.set(xlim=(-0.02, 1.0), ylim=(-LINEAR / 4, 1.5 * reach), xlabel="mass on the first position")
    ax.set(ylabel="retrieval score", title="every head of the model; size and colour: L; labels: layer.head")


def _sides(best: pd.DataFrame) -> list[bool]:
    """Whether a label stands to the right: away from the nearest head that has one, too."""
    import numpy as np

    x, y = best["first"].to_numpy(float), np.log10(best["retrieval"].to_numpy(float)) / 3
    apart = (x[:, None] - x) ** 2 + (y[:, None] - y) ** 2
    np.fill_diagonal(apart, np.inf)
    return [len(best) < 2 or bool(x[at] >= x[near]) for at, near in enumerate(apart.argmin(1) if len(best) else [])]


def _pairs(ax: Any, pairs: pd.DataFrame, quantities: Mapping[str, str]) -> None:
    short = {"perturbation": "L", "effect": "|Δ ln p|", "kl": "KL", "first": "first position", "retrieval": "retrieval"}
    ax.axvline(0, color="black", linewidth=0.8)
    for place, row in enumerate(pairs.to_dict("records")):
        for prefix, colour, fill, apart in (("", BLUE, BLUE, 0.14), ("within_", ORANGE, "white", -0.14)):
            y = apart - place
            ax.plot(row[f"{prefix}mean"], y, "o", color=colour, mfc=fill, markersize=4.5, label=f"{prefix}mean")
            ax.hlines(y, row[f"{prefix}low"], row[f"{prefix}high"], colors=colour, linewidth=1.2)
    named = [
        f"{short.get(row['first'], row['first'])} × {short.get(row['second'], row['second'])}" for row in _rows(pairs)
    ]
    ax.set_yticks([-place for place in range(len(pairs))], named, fontsize=8)
    ax.set(xlim=(-1.03, 1.03), xlabel="Spearman's ρ over heads", title="which quantities rank heads alike")


def _rows(pairs: pd.DataFrame) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pairs.to_dict("records")
    return found


def _effects(ax: Any, df: pd.DataFrame) -> None:
    shown = df[(df["perturbation"] > 0) & (df["effect"] > 0)]
    points = ax.scatter(shown["perturbation"], shown["effect"], c=shown["first"], s=12, cmap="viridis", linewidths=0)
    ax.figure.colorbar(points, ax=ax, pad=0.01, fraction=0.05, label="mass on the first position")
    if len(shown):
        ax.set(xscale="log", yscale="log")
    hit = shown[shown["copy"]]
    ax.plot(hit["perturbation"], hit["effect"], "o", mfc="none", mec=ORANGE, markersize=8, label="copy")
    ax.set(xlabel="exact L", ylabel="|Δ ln p| of the answer (nats)", title="measured one by one; ringed: copying heads")
    ax.axhline(1e-5, color=GREY, linewidth=0.8, linestyle=":")

"""Figures of ``kvprobe heads``: which heads search, whether they are the same with other items, and what they carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from kvprobe.plots.style import GREY, Sheet, headline, plural, sheet, signed, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

BLUE, ORANGE = "#0072B2", "#D55E00"
NAMES = {"retrieval": "retrieval score (Wu et al.)", "reasoning": "reasoning score (R2)"}
MARKED = 10
"""Heads that a map marks."""
LABELLED = 8
"""Heads that are named beside their dots, where there is room."""


def scan_figures(tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> dict[str, Sheet]:
    """All figures of a scan: name of the file → figure.

    Parameters
    ----------
    tables
        :meth:`kvprobe.heads.Result.tables`.
    summary
        Its summary with the ``model``.
    """
    figures = {
        "heads": scores_by_head(tables["heads"], tables["trials"], summary),
        "first_layers": diffuse_layers(tables["heads"], summary),
    }
    if summary["stability"]["rho"] is not None:
        figures["stability"] = scores_by_seed(tables["heads"], summary)
    if "causal" in tables and summary["causal"]["top_k"] is not None:
        figures["causal"] = top_against_random(tables["causal"], summary)
    if "knockouts" in tables:
        figures["knockouts"] = single_heads(tables["knockouts"], summary)
    return figures


@styled
def plain_map(ax: Axes, frame: pd.DataFrame, value: str, *, cmap: str = "Blues", limits: Any = (None, None)) -> Any:
    """Heat map of one number a head, layers from left to right, heads from top to bottom; NaN is grey."""
    from matplotlib import colormaps

    grid = np.full((int(frame["head"].max()) + 1, int(frame["layer"].max()) + 1), np.nan)
    grid[frame["head"], frame["layer"]] = frame[value]
    colours = colormaps[cmap].with_extremes(bad="#BFBFBF")
    image = ax.imshow(grid, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto", interpolation="nearest")
    for axis, number in ((ax.xaxis, grid.shape[1]), (ax.yaxis, grid.shape[0])):
        axis.set_major_locator(MaxNLocator(nbins=min(number, 9), integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    ax.set(xlabel="layer", ylabel="head")
    return image


@styled
def scores_by_head(heads: pd.DataFrame, trials: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """Both scores of every head, the best marked, and beside each which cells of the grid were answered."""
    kinds = [kind for kind in NAMES if summary[kind]["share"] is not None]
    figure = sheet(height=1.3 + 2.5 * len(kinds))
    axes = figure.subplots(len(kinds), 2, width_ratios=(3, 1), squeeze=False)
    for kind, (left, right) in zip(kinds, axes, strict=True):
        image = plain_map(left, heads, kind, limits=(0, None))
        best = heads.nlargest(MARKED, kind)
        left.plot(best["layer"], best["head"], linestyle="none", marker="o", mfc="none", mec=ORANGE, markersize=7)
        figure.colorbar(image, ax=left, pad=0.01, fraction=0.05)
        row = summary[kind]
        left.set_title(
            f"{NAMES[kind]}, {row['task']}: {row['n_heads_at_threshold']} of {len(heads)} heads ≥ {row['threshold']:g}"
        )
        _answered(right, trials[trials["score"] == kind], row)
    headline(
        figure,
        "Retrieval and reasoning scores of every head",
        f"{_about(summary)}. Retrieval: share of the value that the head copies (its first choice is the token "
        "written); reasoning: attention to the value among the head's top positions.",
        f"Circles: the top {MARKED}. Right: trials whose answer counts. Means over those trials.",
    )
    return figure


def _answered(ax: Axes, trials: pd.DataFrame, row: Mapping[str, Any]) -> None:
    """Share of answered trials by length and depth."""
    cells = trials.pivot_table(index="depth", columns="length", values="kept", aggfunc="mean")
    ax.imshow(cells.to_numpy(float), cmap="Greens", vmin=0, vmax=1.4, aspect="auto", interpolation="nearest")
    few = cells.size <= 60
    for (i, j), value in np.ndenumerate(cells.to_numpy(float)) if few else ():
        ax.text(j, i, f"{value:.2g}", ha="center", va="center", fontsize=7)
    step = 1 if few else 4
    ax.set_xticks(range(0, cells.shape[1], step), [str(x) for x in cells.columns[::step]], fontsize=7, rotation=45)
    ax.set_yticks(range(0, cells.shape[0], step), [f"{x:g}" for x in cells.index[::step]], fontsize=7)
    ax.set(xlabel="length, tokens", ylabel="depth, %")
    ax.set_title(f"kept: {row['n_kept']} of {row['n']}")


@styled
def scores_by_seed(heads: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """Retrieval scores of the first seed against those of the second; every dot is a head."""
    figure = sheet(width=5.2, height=4.8)
    ax = figure.add_subplot()
    first, second = summary["seeds"][:2]
    x, y = (heads[f"retrieval_seed_{seed}"] for seed in (first, second))
    ends = (0, 1.05 * max(float(x.max()), float(y.max()), 1e-3))
    ax.plot(ends, ends, color=GREY, linewidth=0.8, linestyle=":")
    ax.plot(x, y, linestyle="none", marker="o", markersize=4, mfc=BLUE, mec="white", alpha=0.7)
    named: list[tuple[float, float]] = []
    for place in (x + y).nlargest(LABELLED).index:
        at = (float(x[place]), float(y[place]))
        if all(abs(at[0] - u) > 0.08 * ends[1] or abs(at[1] - v) > 0.05 * ends[1] for u, v in named):
            label = f"{heads['layer'][place]}.{heads['head'][place]}"
            ax.annotate(label, at, (4, 3), textcoords="offset points", fontsize=7)
            named.append(at)
    ax.set(xlabel=f"retrieval score, seed {first}", ylabel=f"retrieval score, seed {second}", xlim=ends, ylim=ends)
    row = summary["stability"]
    headline(
        figure,
        "The same heads with other needles?",
        f"{summary['model']}, {summary['task']}. Spearman {row['rho']:.2f} {_ends(row)} over {row['n_heads']} heads.",
        f"Labels: layer.head, where there is room. Interval: bootstrap over {row['n_cells']} cells of the grid (errs "
        "to the low side).",
    )
    return figure


@styled
def top_against_random(rows: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """Each answered item: the answer's loss with the evidence masked in top heads, and in other heads."""
    figure = sheet(width=7.0, height=4.2)
    ax = figure.add_subplot()
    answered = rows[rows["answered"]]
    for place, (_, mine) in enumerate(answered.groupby("item", sort=True)):
        top, drawn = (mine.loc[mine["arm"] == arm, "delta_logprob"] for arm in ("top", "random"))
        ax.plot([place, place], [float(top.mean()), float(drawn.mean())], color=GREY, linewidth=0.8, zorder=1)
        ax.plot(
            np.full(len(drawn), place + 0.16),
            drawn,
            linestyle="none",
            marker=".",
            color="#9A9A9A",
            markersize=4,
            label="" if place else "random heads, one draw",
        )
        ax.plot(
            [place],
            [drawn.mean()],
            marker="s",
            color=BLUE,
            markersize=6,
            linestyle="none",
            label="" if place else "random heads, mean",
        )
        ax.plot(
            [place],
            [top.mean()],
            marker="*",
            color=ORANGE,
            markersize=11,
            linestyle="none",
            label="" if place else "top heads",
        )
    ax.axhline(0, color=GREY, linewidth=0.8, linestyle=":")
    ax.set(xlabel="item that the clean run answers", ylabel="Δ log-prob of the answer, nats")
    ax.set_xlim(-0.5, answered["item"].nunique() - 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    row = summary["causal"]
    few = ", the smallest that is attainable" if row["cannot_reject"] else ""
    fewer = f" Only {row['k'] - row['short']} other heads are there: no fair comparison." if row["short"] else ""
    handles, _ = ax.get_legend_handles_labels()
    headline(
        figure,
        f"Evidence masked in the top {row['k']} retrieval heads alone",
        f"{summary['model']}, {summary['task']}, {plural(row['n'], 'item')}: {signed(row['top_k'])} against "
        f"{signed(row['random_k'])} nats in other heads of the same layers; difference {signed(row['difference'])} "
        f"{_ends(row)}, sign flip p {row['p_signflip']:.2g}{few}.{fewer}",
        "Other needles than those of the trials that named the heads; the filler essays are the same.",
        handles,
    )
    return figure


@styled
def single_heads(knockouts: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """Effect of masking the evidence in one head, and that head's closed-form perturbation: maps, one on the other."""
    figure = sheet(height=5.8)
    axes = figure.subplots(2, 2, width_ratios=(3, 2))
    reach = float(knockouts["delta_logprob"].abs().max()) or 1.0
    panels: list[tuple[str, str, str, Any]] = [
        ("delta_logprob", "Δ log-prob of the answer, nats", "PuOr", (-reach, reach)),
        ("perturbation", f"exact L of the head (L{summary['norm']} norm)", "Blues", (0, None)),
    ]
    for ax, (value, said, cmap, limits) in zip(axes[:, 0], panels, strict=True):
        figure.colorbar(plain_map(ax, knockouts, value, cmap=cmap, limits=limits), ax=ax, pad=0.01, fraction=0.05)
        ax.set_title(said)
    row = summary["knockouts"]
    for ax, (value, said) in zip(
        axes[:, 1], (("kl", "KL, nats"), ("delta_logprob", "|Δ log-prob|, nats")), strict=True
    ):
        _against(ax, knockouts, value)
        rho = row["kl_perturbation"] if value == "kl" else row["delta_perturbation"]
        said_rho = "undefined" if rho is None else f"{rho:.2f}"
        ax.set(xlabel="exact L", ylabel=said, title=f"Spearman {said_rho} over {len(knockouts)} heads")
    headline(
        figure,
        "The needle masked in one head at a time",
        f"{summary['model']}, {summary['task']}, one item of {row['tokens']} tokens, {len(knockouts)} runs over "
        "one prefix.",
        "L: change of the head's own output by the mask, closed form of the clean run, mean over question and answer "
        "rows. Log axes leave out heads at 0; effects below about 1e-5 nats (KL: 1e-9) are rounding of float32.",
    )
    return figure


def _against(ax: Axes, frame: pd.DataFrame, value: str) -> None:
    x, y = frame["perturbation"].to_numpy(float), frame[value].abs().to_numpy(float)
    shown = (x > 0) & (y > 0)
    points = ax.scatter(x[shown], y[shown], c=frame["layer"].to_numpy()[shown], s=10, cmap="viridis")
    ax.figure.colorbar(points, ax=ax, pad=0.01, fraction=0.05, label="layer")
    if shown.any():
        ax.set(xscale="log", yscale="log")


@styled
def diffuse_layers(heads: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    """Top-½-budget mass and entropy of every head by layer: where attention is too diffuse to select from."""
    row = summary["first_layers"]
    figure = sheet(height=5.2)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for ax, value in ((upper, "top_mass"), (lower, "relative_entropy")):
        ax.plot(
            heads["layer"], heads[value], linestyle="none", marker="o", markersize=3.5, mfc=BLUE, mec="none", alpha=0.6
        )
        means = heads.groupby("layer")[value].mean()
        ax.plot(means.index, means, color=ORANGE, linewidth=1.2)
        for layer in row["excluded"]:
            ax.axvspan(layer - 0.5, layer + 0.5, facecolor="none", edgecolor="black", hatch="////", linewidth=0)
        ax.set_ylim(0, 1.02)
    upper.axhline(row["rule"]["mass"], color=GREY, linewidth=0.8, linestyle=":")
    upper.set_ylabel("mass of the top\n½-budget keys")
    lower.set(ylabel="entropy ÷\nln(visible keys)", xlabel="layer")
    lower.set_xlim(-0.6, float(heads["layer"].max()) + 0.6)
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    found = row["excluded"]
    excluded = f"layer{'s' * (len(found) > 1)} {', '.join(map(str, found))}" if found else "none"
    headline(
        figure,
        "Which layers attend too diffusely?",
        f"{_about(summary)}. Rule stated before the run: {row['rule_text']}. Excluded: {excluded}.",
        "Dots: heads, means over the rows that wrote the answers; line: mean of a layer; hatched: excluded; dotted: "
        "½ of the attention (Assumption 3.4 of CriticalKV, Fig. 8).",
    )
    return figure


def _about(summary: Mapping[str, Any]) -> str:
    lengths = summary["lengths"]
    return f"{summary['model']}, {summary['task']}, {min(lengths)}–{max(lengths)} tokens"


def _ends(row: Mapping[str, Any]) -> str:
    low, high = row["ci_low"], row["ci_high"]
    return "[no interval]" if low is None or low != low else f"[{low:.2f}, {high:.2f}]".replace("-", "−")

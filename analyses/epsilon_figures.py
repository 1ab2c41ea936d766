"""The figure of epsilon_sensitivity, drawn from its table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from needle_items import subtitle

from kvprobe.plots import headline, sheet
from kvprobe.plots.style import styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Line = tuple[str, float | None, str, str, str]
"""Quantity, cache size (None: not the selector's), label, colour, marker."""
ORANGE, BLUE, GREEN, GREY, PURPLE = "#D55E00", "#0072B2", "#009E73", "#595959", "#CC79A7"
ALIKE: tuple[Line, ...] = (
    ("auroc", None, "AUROC above first 4", ORANGE, "o"),
    ("order", None, "rank corr. with ε = 0", BLUE, "s"),
    ("top_heads", None, "top shared, in a head", GREEN, "^"),
    ("top_pooled", None, "top shared, pooled", GREY, "v"),
)
MORE: tuple[Line, ...] = (
    ("evidence / first4", None, "evidence / first 4", ORANGE, "o"),
    ("evidence / other", None, "evidence / other", BLUE, "s"),
    ("evidence / first4 per token", None, "first 4, per token", "#E69F00", "^"),
    ("evidence / other per token", None, "other, per token", "#56B4E9", "v"),
)
INSIDE: tuple[Line, ...] = (
    ("value", None, "with m: value", ORANGE, "o"),
    ("rarity", None, "with −s: rarity", BLUE, "s"),
)


@styled
def epsilon_sensitivity(df: pd.DataFrame) -> Figure:
    """Value mass in the first two panels, ρ in the third, the second stage's L and choices in the rest."""
    about = df.attrs["about"]
    figure = sheet(9.8, 8.2)
    axes = figure.subplots(2, 3)
    _panel(axes[0, 0], df, ALIKE, "(a) s^val: which tokens lead", "AUROC, correlation or part")
    axes[0, 0].axhline(0.5, color="black", linewidth=0.8, linestyle=":")
    _panel(axes[0, 1], df, MORE, "(a) s^val: who has more", "log2 of the ratio of value masses")
    axes[0, 1].axhline(0, color="black", linewidth=0.8)
    _panel(axes[0, 2], df, INSIDE, "(b) ρ with ε inside, m (1 + ε/s)", "rank correlation within a head")
    axes[0, 2].axhline(0, color="black", linewidth=0.8)
    changes, gains, kept = _selector(about)
    _panel(axes[1, 0], df, changes, f"(c) L against ε = {power(about['reference'])}", "change of L, %")
    _panel(axes[1, 1], df, gains, "(c) L against no second stage", "change of L, %")
    for ax in axes[1, :2]:
        ax.axhline(0, color="black", linewidth=0.8)
    _panel(axes[1, 2], df, kept, f"(c) choices against ε = {power(about['reference'])}", "part of entries")
    headline(figure, "Do conclusions depend on ε?", f"{subtitle(about)} · {about['base']} + two_stage", _note(about))
    return figure


def _selector(about: Mapping[str, Any]) -> tuple[tuple[Line, ...], tuple[Line, ...], tuple[Line, ...]]:
    """The selector's panels: a line a cache size."""
    looks = ((ORANGE, "o"), (BLUE, "s"), (GREEN, "^"), (GREY, "v"))
    caches = [(float(cache), *looks[place % len(looks)]) for place, cache in enumerate(about["caches"])]
    changes = tuple(("change", cache, f"{100 * cache:g} % cache", *look) for cache, *look in caches)
    gains = tuple(("gain", cache, f"{100 * cache:g} % cache", *look) for cache, *look in caches)
    kept = [("kept_second", cache, f"second stage, {100 * cache:g} %", *look) for cache, *look in caches]
    kept += [("evidence_kept", cache, f"evidence kept, {100 * cache:g} %", look[0], "x") for cache, *look in caches]
    return changes, gains, tuple(kept)


def _panel(ax: Any, df: pd.DataFrame, lines: tuple[Line, ...], title: str, label: str) -> None:
    """Means with intervals at evenly spaced ε; lines stand side by side."""
    values = list(dict.fromkeys(df["epsilon"]))
    for number, (quantity, cache, name, colour, marker) in enumerate(lines):
        mine = df[(df["quantity"] == quantity) & (df["cache"].isna() if cache is None else df["cache"] == cache)]
        x = [values.index(value) + 0.12 * (number - (len(lines) - 1) / 2) for value in mine["epsilon"]]
        style = "--" if marker == "x" else "-"
        ax.plot(x, mine["mean"], color=colour, marker=marker, linestyle=style, markersize=4.5, linewidth=1, label=name)
        ax.vlines(x, mine["low"], mine["high"], colors=colour, linewidth=1.1)
    ax.set_xticks(range(len(values)), [power(value) for value in values])
    ax.set(xlabel="ε", ylabel=label, title=title)
    ax.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2, columnspacing=1.0)


def power(value: float) -> str:
    """A power of ten as one, other numbers as they are."""
    from math import log10

    exponent = log10(value) if value > 0 else 0.0
    whole = round(exponent)
    return f"$10^{{{whole}}}$" if whole < -1 and abs(exponent - whole) < 1e-9 else f"{value:g}"


def _note(about: Mapping[str, Any]) -> str:
    n, top = about["context"], 100 * about["top"]
    return (
        f"Bars: 95 % over items. A key's mean attention is about 1 / {n:.0f} = {1 / n:.1g}. (a, b) means over question "
        f"and teacher-forced answer rows; top: {top:g} % of the tokens. (c) {about['base']} ({about['preset']}) with "
        f"and without the second stage on the same contexts, question unseen; L in the L{about['norm']} norm, mean "
        f"over heads; row: {about['probe']}; second stage: part of the entries that it adds at the reference ε and "
        "keeps here, too. Exploratory."
    )

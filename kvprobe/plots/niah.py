"""The figures of a needle run, drawn from its tables and its summary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvprobe.plots import heads as head_plots
from kvprobe.plots import masses
from kvprobe.plots.arms import LINEAR, answer_by_arm
from kvprobe.plots.style import WIDTH, Sheet, headline, plural, sheet, styled

if TYPE_CHECKING:
    import pandas as pd

PLACES = {"last": "at the last prompt token", "answer": "at the answer tokens"}
NAMES = {"hard": "other needle", "decoy": "decoy", "distractor": "haystack span"}
HEADS_NOTE = (
    "AUROC: how often a head gives the asked needle more attention than another span of the same item, mean over "
    "items. Above each map: mean over heads [95% interval over items]. Significance: the needle's label permuted "
    "within items, for all heads at once (max-T)."
)
CONTRASTS = {"vs_hard": ("hard", "decoy"), "vs_distractor": ("distractor",)}


def niah_figures(tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> dict[str, Sheet]:
    """Name → figure of one run.

    ``auroc_heads``: which heads attend to the asked needle more than to what it is compared with. ``mass_value_mass``:
    whether that attention carries values. ``answer_by_arm``: what the answer loses without each kind of span. A run
    with nothing to compare the needle with has no map of heads.

    Parameters
    ----------
    tables
        ``items``, ``spans``, ``heads`` and ``arms``, as :class:`kvprobe.needles.Result` makes them.
    summary
        What ``kvprobe niah`` prints with ``--json``; a summary read back from its file does, too.
    """
    maps = {"auroc_heads": _auroc_heads(tables["heads"], tables["items"], summary)} if len(tables["heads"]) else {}
    return {
        **maps,
        "mass_value_mass": _mass_value_mass(tables["spans"], summary),
        "answer_by_arm": _answer_by_arm(tables["arms"], summary),
    }


def subtitle(summary: Mapping[str, Any]) -> str:
    """Model, task, length, n, seed and whose protocol: what a figure must not be shown without."""
    settings = summary.get("settings", {})
    protocol = {"criticalkv": "CriticalKV"}.get(settings.get("options", {}).get("template"), "RULER")
    parts = [
        summary.get("model", "model not named"),
        summary["task"],
        f"{summary['length']} tokens",
        f"n = {plural(summary['n_items'], 'item')}",
        f"seed {summary['seed']}",
        f"{protocol}'s protocol, items generated here (not its data)",
    ]
    return " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


@styled
def _auroc_heads(heads: pd.DataFrame, items: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    mass = heads[heads["feature"] == "mass"]
    rows = [name for name in CONTRASTS if (mass["contrast"] == name).any()]
    tall = min(max(4.0 * (mass["head"].max() + 1) / (mass["layer"].max() + 1), 1.1), 3.4)
    figure = sheet(WIDTH, len(rows) * (tall + 0.85) + 1.5)
    axes = figure.subplots(len(rows), len(PLACES), sharex=True, sharey=True, squeeze=False)
    panels = []
    for ax, (name, where) in zip(axes.flat, itertools.product(rows, PLACES), strict=True):
        panel = mass[(mass["contrast"] == name) & (mass["where"] == where)]
        panels.append(panel.assign(p_attainable=panel.get("p_attainable", _attainable(items, name))))
        title = f"against {_others(items, name)}\n{PLACES[where]}{_mean(summary, name, where)}"
        image = head_plots.head_map(ax, panels[-1], title=title)
        ax.label_outer()
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=25)
    bar.ax.set_title("AUROC of\nattention mass", pad=8)
    bar.set_ticks([0, 0.5, 1], labels=["0  always less", "0.5  no difference", "1  always more"])
    title = "Which heads attend to the asked needle more than to other spans?"
    headline(figure, title, subtitle(summary), HEADS_NOTE, head_plots.legend_handles(panels), ncols=4)
    return figure


def _others(items: pd.DataFrame, name: str) -> str:
    """``3 other needles + 4 decoys``: the most that an item has of each."""
    counts = {label: int(items[label].max()) for label in CONTRASTS[name] if label in items}
    return " + ".join(plural(count, NAMES[label]) for label, count in counts.items() if count)


def _attainable(items: pd.DataFrame, name: str) -> float:
    """1 ÷ the number of ways to choose the needle within items: no permutation p is smaller."""
    others = items[list(CONTRASTS[name])].sum(axis=1)
    pairs = zip(items["evidence"], others, strict=True)
    return 1 / math.prod(math.comb(int(m + k), int(m)) for m, k in pairs)


def _mean(summary: Mapping[str, Any], name: str, where: str) -> str:
    """``, mean 0.55 [0.01, 1.00]``; empty where the summary has none."""
    found = ((summary.get({"last": "auroc", "answer": "auroc_answer"}[where]) or {}).get(name) or {}).get("mass")
    if not found or found["mean"] is None:
        return ""
    low, high = (math.nan if found[key] is None else found[key] for key in ("ci_low", "ci_high"))
    interval = f" [{low:.2f}, {high:.2f}]" if math.isfinite(low + high) else ""
    return f", mean {found['mean']:.2f}{interval}"


@styled
def _mass_value_mass(spans: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    settings = summary.get("settings", {})
    excluded = settings.get("exclude_layers") or []
    spans = spans[~spans["layer"].isin(excluded)]
    figure = sheet(WIDTH, 5.2)
    axes = figure.subplots(1, len(PLACES), sharex=True, sharey=True)
    for ax, (where, place) in zip(axes, PLACES.items(), strict=True):
        masses.mass_against_value_mass(ax, spans, where, p=settings.get("p", 1), title=place)
        ax.label_outer()
    n_layers, n_heads = spans["layer"].nunique(), spans["head"].max() + 1
    without = f" (without {', '.join(map(str, excluded))}, excluded beforehand)" if excluded else ""
    note = (
        f"One point a span of an item; means over {n_layers} layers{without} × {n_heads} heads, and over answer "
        "tokens. Re-read: the span gets attention and its values reach the output. Sink-like: attention parked where "
        "values are small."
    )
    title = "Does the attention that a span gets carry values?"
    headline(figure, title, subtitle(summary), note, masses.legend_handles(spans))
    return figure


@styled
def _answer_by_arm(arms: pd.DataFrame, summary: Mapping[str, Any]) -> Sheet:
    figure = sheet(WIDTH, 5.0)
    answer_by_arm(figure.subplots(), arms, summary["ablation"])
    clean = arms.loc[arms["label"] == "clean", "score"].mean()
    interval = "[95% interval]" if summary["n_items"] > 1 else "(one item: no interval)"
    note = (
        f"Points: masked spans; grey lines: items, through their means; diamonds: mean over items {interval}. Grey "
        f"band (±{LINEAR}): linear scale, logarithmic outside. The context is prefilled whole; a masked span is then "
        f"hidden from question and answer. With nothing masked the answer is right in {clean:.0%}."
    )
    headline(figure, "What does the answer lose when a span is masked?", subtitle(summary), note)
    return figure

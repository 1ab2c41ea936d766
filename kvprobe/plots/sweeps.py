"""Sweeps of one setting of the second stage: what it changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvprobe.plots.style import GREY, Sheet, headline, plural, sheet, styled
from kvprobe.plots.wording import about, over, per_cent

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

CACHES = (("#0072B2", "o", "-"), ("#D55E00", "s", (0, (4, 2))), ("#009E73", "^", (0, (1, 1.5))), ("#CC79A7", "D", "-."))
SETTING = {"alpha": "α, share of the first stage", "epsilon": "ε, and below it ε · n", "norm": "p of the value norm"}
NONE = 1e99
"""Stands for the value NaN, no second stage, among the keys."""


class Measure(NamedTuple):
    """What a panel shows: a column, the ends of its interval, where a dotted line stands, and what follows the norm."""

    column: str
    low: str
    high: str
    at: float | None = None
    unit: str = ""


CHANGE = Measure("change", "ci_low", "ci_high", 0.0, " norm")
REDUCED = Measure("heads_reduced", "heads_low", "heads_high", 0.5, ", share")
LOGPROB = Measure("delta_logprob", "logprob_low", "logprob_high", 0.0)
SCORE = Measure("score", "ci_low", "ci_high")
NOTE_ALPHA = (
    " α = 1 is the policy without a second stage: nothing changes, and no head is reduced. Values that agree: their "
    "first stage is smaller than the window, which is kept in any case."
)
NOTE_SCORES = (
    " Δ ln p: of the gold answer, against the whole cache; score and Δ ln p: 95 % over items; none: no second stage."
)


@styled
def sweep_curves(sweeps: pd.DataFrame, scores: pd.DataFrame | None, summary: Mapping[str, Any]) -> Sheet:
    """What one setting of the second stage changes, from above: mean L, heads reduced, and a task's answers.

    Parameters
    ----------
    sweeps
        Rows of one sweep (:func:`kvprobe.audits.sweep`), with the ``base`` swept; ``measured`` (p of L) may tell
        several norms apart.
    scores
        The task's scores under the same values and, at the value NaN, without a second stage; None: none.
    """
    kind, plain = sweeps["sweep"].iloc[0], sweeps
    if "measured" not in sweeps:
        plain = sweeps.assign(measured=summary["norm"])
    lines = [
        (plain[plain["measured"] == p], each, f"{said}\n(L{p:.0f}{each.unit})")
        for each, said in ((CHANGE, "mean L,\nagainst none"), (REDUCED, "heads reduced"))
        for p in dict.fromkeys(plain["measured"])
    ]
    answers = scores if scores is not None and len(scores) else None
    if answers is not None:
        lines += [(answers, LOGPROB, "Δ ln p of the\nanswer (nats)"), (answers, SCORE, "task score")]
    presets = list(dict.fromkeys(sweeps["preset"]))
    figure = sheet(height=1.9 + 1.45 * len(lines))
    axes = figure.subplots(len(lines), len(presets), sharex=True, sharey="row", squeeze=False)
    for (row, column), ax in np.ndenumerate(axes):
        table, measure, label = lines[row]
        mine = sweeps[sweeps["preset"] == presets[column]]
        places = _places(ax, kind, mine, answers is not None)
        handles = _curves(ax, table[table["preset"] == presets[column]], places, measure)
        if column == 0:
            ax.set_ylabel(label)
        if measure is SCORE:
            ax.set_ylim(-0.05, 1.05)
        if row == 0:
            ax.set_title(f"{mine['base'].iloc[0]}+two_stage, {presets[column]}")
        if row == len(lines) - 1:
            ax.set_xlabel(SETTING[kind] + (" (steps not to scale)" if kind == "epsilon" else ""))
    norms, task = " and L".join(f"{p:.0f}" for p in dict.fromkeys(plain["measured"])), ""
    if answers is not None:
        task = f" {answers['task'].iloc[0]}: {plural(int(answers['n'].max()), 'item')}."
    headline(
        figure,
        f"What {SETTING[kind].split(',')[0]} changes",
        f"{about({**summary, 'norm': norms})}; {sweeps['n_tokens'].iloc[0]:.0f} tokens compressed on average.{task}",
        f"mean L, against none: mean over heads of L minus L without the second stage; bars: {over(summary)}. heads "
        "reduced: share of the heads whose mean L is lower than without."
        + (NOTE_ALPHA if kind == "alpha" and (sweeps["value"] == 1).any() else "")
        + (NOTE_SCORES if answers is not None else ""),
        handles,
    )
    return figure


def _places(ax: Axes, kind: str, rows: pd.DataFrame, none: bool) -> dict[float, float]:
    """Where each value stands: α to scale, others in even steps; ``none`` behind them."""
    rows = rows.drop_duplicates("value").sort_values("value")
    values = rows["value"].astype(float).tolist()
    places = {value: value if kind == "alpha" else float(at) for at, value in enumerate(values)}
    labels = [f"{value:g}" for value in values]
    if kind == "epsilon":
        labels = [f"{label}\n{size:.2g}" for label, size in zip(labels, rows["epsilon_n"], strict=True)]
    gap = float(min(np.diff(sorted(places.values())), default=1.0))
    if none:
        places[NONE] = max(places.values()) + 1.2 * gap
        labels.append("none")
    ax.set_xticks(list(places.values()), labels, fontsize=8 if len(labels) < 10 else 7)
    ax.set_xlim(min(places.values()) - 0.6 * gap, max(places.values()) + 0.6 * gap)
    return places


def _curves(ax: Axes, rows: pd.DataFrame, places: Mapping[float, float], of: Measure) -> list[Any]:
    """A line a cache, and its hollow mark without the second stage; returns handles."""
    if of.at is not None:
        ax.axhline(of.at, color=GREY, linewidth=0.9, linestyle=":", zorder=0)
    caches, handles = sorted(set(rows["cache"])), []
    gap = min(np.diff(sorted(places.values())), default=1.0)
    for number, cache in enumerate(caches):
        colour, marker, style = CACHES[number % len(CACHES)]
        mine = rows[rows["cache"] == cache].sort_values("value")
        keys = mine["value"].astype(float).fillna(NONE)
        x = keys.map(places).to_numpy() + 0.12 * gap * (number - (len(caches) - 1) / 2)
        y, ends = mine[of.column].to_numpy(float), mine[[of.low, of.high]].to_numpy(float).T
        ax.errorbar(x, y, yerr=np.abs(ends - y), fmt="none", ecolor=colour, elinewidth=1, capsize=2, alpha=0.7)
        taken = (keys != NONE).to_numpy()
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.5}
        handles += ax.plot(x[taken], y[taken], linestyle=style, label=f"cache {per_cent(cache)}", **look)
        ax.plot(x[~taken], y[~taken], linestyle="none", markerfacecolor="white", **look)
    return handles

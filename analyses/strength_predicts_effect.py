"""Which strength, read off the clean run, tells how much the removal of a span will change the answer?

    python analyses/strength_predicts_effect.py --out out/strength_predicts_effect

Within every item, over the needle, needles never asked about, and haystack windows across the whole range of θ: the
rank correlation of θ, θ_c, L, w_S and a_S with what removal did. Writes ``rows.parquet`` (a row a task × spans ×
strength × outcome), ``items.parquet`` (the correlations of each item), ``spans.parquet``, the figure and a manifest.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common import Analysis, progress, words
from span_effects import MANY, TASKS, Observed, items, spread, whole

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure

    from kvprobe.tasks.items import Item

MEASURES = {"bound": "θ", "centred": "θ_c", "perturbation": "L", "value_mass": "w_S", "mass": "a_S"}
OUTCOMES = {"kl": "KL", "drop": "log-prob drop", "size": "|Δ log-prob|"}
LOOKS = {"kl": ("#0072B2", "o"), "drop": ("#D55E00", "s"), "size": ("#009E73", "^")}
SPANS = {"all": "needles and haystack windows", "haystack": "haystack windows alone"}
ROWS = {"all": "needles and windows", "haystack": "windows alone"}
NAMES = ["task", "spans", "measure", "outcome"]
FEWEST = 3
"""Spans under which a rank correlation says nothing."""

__all__ = ["ANALYSIS", "compute", "main", "plan", "plot"]


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a run."""

    made: dict[str, list[Item]] = field(repr=False)
    tasks: tuple[str, ...] = TASKS
    items: int = 6
    length: int = 1100
    needles: int = 9
    windows: int = 32
    seed: int = 0


def plan(model: Any, **asked: Any) -> Plan:
    """Check everything, and make the items: see :class:`Plan` for what can be asked."""
    from kvprobe.errors import TaskError, quote

    planned = Plan({}, **asked)
    if not planned.tasks or len({*planned.tasks}) < len(planned.tasks) or not {*planned.tasks} <= {*TASKS}:
        raise TaskError(f"tasks={quote(','.join(planned.tasks))}, must be some of {', '.join(TASKS)}, each once")
    least = {"items": 1, "length": 1, "needles": 1, "windows": FEWEST, "seed": 0}
    whole({name: (getattr(planned, name), low) for name, low in least.items()})
    for task in planned.tasks:
        planned.made[task] = items(model, task, planned.items, planned.length, planned.seed, planned.needles)
    return planned


def compute(model: Any, asked: Plan) -> pd.DataFrame:
    """Mean within-item rank correlation of every strength with every outcome.

    Returns
    -------
    DataFrame
        ``task``; ``spans``: ``"all"``, or ``"haystack"`` (no needle among them); ``measure``; ``outcome``: ``kl``,
        ``drop`` (clean − masked log-prob of the gold answer, nats), ``size`` (its absolute value); ``rho``, ``ci_low``,
        ``ci_high``, ``method``: mean over items; ``n``; ``undefined``: items without variation.
        ``attrs["tables"]``: ``items``, ``spans``.
    """
    import pandas as pd

    jobs = [(task, index, item) for task, made in asked.made.items() for index, item in enumerate(made)]
    spans = pd.concat([measured(model, *job, asked) for job in progress("items")(jobs)], ignore_index=True)
    by_item = correlations(spans)
    table = summary(by_item, asked.seed)
    facts = {"items": asked.items, "length": asked.length, "windows": asked.windows, "needles": asked.needles}
    semantics = "prefill-then-evict: masks act on question and teacher-forced answer"
    about = {"model": model.name, "seed": asked.seed, "semantics": semantics, **facts}
    table.attrs = {"tables": {"items": by_item, "spans": spans}, "about": about}
    return table


def measured(model: Any, task: str, index: int, item: Item, asked: Plan) -> pd.DataFrame:
    """One row a span of an item: its strengths, and what its removal did."""
    from kvprobe.placebo import set_strengths, window_strengths
    from kvprobe.placebo.keysets import text

    seen = Observed.of(model, item)
    starts = seen.room.starts(seen.length)
    theta = window_strengths(seen.trace, seen.length).bound[starts]
    windows = spread(seen.room.windows(seen.length), theta, asked.windows)
    sets = [seen.evidence, *seen.hard, *windows]
    strengths = set_strengths(seen.trace, sets, measures=tuple(MEASURES))[[*MEASURES]]
    table = strengths.join(seen.effects(seen.masks(sets)))
    kinds = ["evidence"] + ["hard"] * len(seen.hard) + ["haystack"] * len(windows)
    facts = {"task": task, "item": index, "kind": kinds, "spans": [text(keys) for keys in sets]}
    return table.assign(**facts, drop=-table["effect"], size=table["effect"].abs())


def correlations(spans: pd.DataFrame) -> pd.DataFrame:
    """Spearman's ρ within each item: ``task``, ``item``, ``spans``, ``measure``, ``outcome``, ``rho``, ``n_spans``."""
    import pandas as pd

    rows = []
    for (task, item), every in spans.groupby(["task", "item"], sort=False):
        for which, mine in (("all", every), ("haystack", every[every["kind"] == "haystack"])):
            named = {"task": task, "item": item, "spans": which, "n_spans": len(mine)}
            for measure in MEASURES:
                for outcome in OUTCOMES:
                    rho = spearman(mine[measure].to_numpy(float), mine[outcome].to_numpy(float))
                    rows.append(named | {"measure": measure, "outcome": outcome, "rho": rho})
    return pd.DataFrame(rows)


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation with midranks; NaN where either is constant, or there are fewer than three spans."""
    import numpy as np
    from scipy.stats import spearmanr

    if len(x) < FEWEST or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(spearmanr(x, y).statistic)


def summary(by_item: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Mean over items, with its interval."""
    import numpy as np
    import pandas as pd

    from kvprobe import stats

    rows = []
    for key, mine in by_item.groupby(NAMES, sort=False):
        known = mine["rho"].dropna().to_numpy()
        facts = dict(zip(NAMES, key, strict=True)) | {"n": len(known), "undefined": len(mine) - len(known)}
        if len(known):
            found = stats.mean_interval(known, seed=seed)
            facts |= {"rho": found.mean, "ci_low": found.low, "ci_high": found.high, "method": found.method}
        else:
            facts |= {"rho": np.nan, "ci_low": np.nan, "ci_high": np.nan, "method": "no item varies"}
        rows.append(facts)
    return pd.DataFrame(rows)


def plot(df: pd.DataFrame) -> Figure:
    """One panel a task and choice of spans: mean rank correlation and its interval, items as dots."""
    from kvprobe.plots.style import styled

    figure: Figure = styled(_drawn)(df)
    return figure


def _drawn(df: pd.DataFrame) -> Figure:
    from matplotlib.lines import Line2D

    from kvprobe.plots.style import GREY, WIDTH, headline, sheet

    about, dots = df.attrs["about"], df.attrs["tables"]["items"]
    tasks, kinds = list(dict.fromkeys(df["task"])), list(SPANS)
    figure = sheet(WIDTH, 1.3 + 2.3 * len(kinds))
    axes = figure.subplots(len(kinds), len(tasks), sharey=True, squeeze=False)
    for line, which in zip(axes, kinds, strict=True):
        for ax, task in zip(line, tasks, strict=True):
            _panel(ax, *(t[(t["task"] == task) & (t["spans"] == which)] for t in (df, dots)))
            ax.set_title(f"{task}: {ROWS[which]}")
        line[0].set_ylabel("rank correlation\nwithin an item")
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="none", label=OUTCOMES[name])
        for name, (colour, marker) in LOOKS.items()
    ]
    handles.append(Line2D([], [], color=GREY, marker=".", markersize=4, linestyle="none", label="one item"))
    said = f"{about['model']} · {about['items']} items a task · {about['length']} tokens · seed {about['seed']}"
    note = (
        "Bars: 95 % intervals of the mean over items. θ bound, θ_c centred bound, L exact perturbation, w_S value "
        "mass, a_S attention mass; summed over layers and heads. A drop has a sign, which no strength knows."
    )
    headline(figure, "Which strength predicts what removal does?", said, note, handles, ncols=4)
    return figure


def _panel(ax: Any, rows: pd.DataFrame, dots: pd.DataFrame) -> None:
    import numpy as np

    ax.axhline(0, color="#595959", linewidth=0.8, zorder=0)
    for shift, (outcome, (colour, marker)) in zip((-0.25, 0, 0.25), LOOKS.items(), strict=True):
        mine = rows[rows["outcome"] == outcome].set_index("measure").reindex([*MEASURES])
        x = np.arange(len(mine)) + shift
        each = dots[dots["outcome"] == outcome]
        at = each["measure"].map({name: place for place, name in enumerate(MEASURES)}) + shift + 0.09
        ax.plot(at, each["rho"], ".", color=colour, alpha=0.35, markersize=4, zorder=1)
        ax.plot(x, mine["rho"], marker, color=colour, markersize=5, zorder=3)
        ax.vlines(x, mine["ci_low"].clip(-1, 1), mine["ci_high"].clip(-1, 1), color=colour, linewidth=1.4, zorder=2)
    ax.set_xticks(range(len(MEASURES)), MEASURES.values())
    ax.set_ylim(-1.05, 1.05)


def report(df: pd.DataFrame) -> None:
    """Print the correlations for a person."""
    about = df.attrs["about"]
    print(f"{about['model']}, {about['items']} items a task of {about['length']} tokens. {about['semantics']}")
    print("mean over items of Spearman's ρ within the item [95 % over items]")
    for (task, which), rows in df.groupby(["task", "spans"], sort=False):
        print(f"\n{task}, {SPANS[which]}:\n      " + "".join(f"{name:>27s}" for name in OUTCOMES.values()))
        for measure, mine in rows.groupby("measure", sort=False):
            cells = mine.set_index("outcome").loc[[*OUTCOMES]].to_dict("records")
            print(f"  {MEASURES[measure]:4s}" + "".join(f"{_cell(cell):>27s}" for cell in cells))


def _cell(row: dict[str, Any]) -> str:
    if not row["n"]:
        return "undefined"
    out = f", {row['undefined']} left out" if row["undefined"] else ""
    ends = "[no interval]" if row["ci_low"] != row["ci_low"] else f"[{row['ci_low']:+.2f}, {row['ci_high']:+.2f}]"
    return f"{row['rho']:+.2f} {ends}{out}"


def _options(parser: argparse.ArgumentParser) -> None:
    usual = Plan({})
    parser.add_argument("--tasks", type=words, default=TASKS, help=f"comma-separated ({','.join(TASKS)})")
    parser.add_argument("--items", type=int, default=usual.items, help="items a task (%(default)s)")
    parser.add_argument("--length", type=int, default=usual.length, help="tokens of an item (%(default)s)")
    help_ = f"needles of {MANY}, one of them asked for (%(default)s)"
    parser.add_argument("--needles", type=int, default=usual.needles, help=help_)
    help_ = "most haystack windows an item, disjoint, across the range of θ (%(default)s)"
    parser.add_argument("--windows", type=int, default=usual.windows, help=help_)


ANALYSIS = Analysis("strength_predicts_effect", (__doc__ or "").splitlines()[0], _options, plan, compute, plot, report)
main = ANALYSIS.main

if __name__ == "__main__":
    sys.exit(main())

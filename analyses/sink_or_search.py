"""Does value tell a sink from a search, or only a sink from everything else?

    python analyses/sink_or_search.py --out out/sink_or_search

Within each needle item, how often does an evidence token have more than a token of another class: the first four
positions, secondary sinks, needles that nobody asks about, the rest of the haystack? By ρ = Σ A m / Σ A (value per
attention), by m alone, by s alone and by s^val = (s + ε) m, pooled and by layer; and are the heads that search other
heads than those that rest on the first position? Exploratory. Writes ``rows.parquet`` (a row a task × contrast ×
measure × layer), ``items.parquet``, ``heads.parquet`` (a row a task × rows × head), ``kinds.parquet``,
``secondary.parquet``, the figure and a manifest.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from common import Analysis, progress, words
from needle_items import Made, subtitle
from sink_items import (
    CONTRASTS,
    SEMANTICS,
    answer_rows,
    averaged,
    measures,
    needle_options,
    needles,
    observed,
    said,
    sorted_keys,
    spearman,
    together,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvprobe.sinks import Scores
    from kvprobe.tasks.items import Item

TASKS = ("niah_single_2", "niah_multikey_1")
ITEMS = 8
SINK, SEARCH = 0.3, 0.1
MEASURES = {
    "relative_ratio": "ρ, m in units of its head's median",
    "ratio": "ρ = Σ A m / Σ A",
    "relative_norm": "m alone, in units of its head's median",
    "norm": "m alone",
    "mass": "s alone",
    "value_mass": "s^val = (s + ε) m",
}
CLASSES = {
    "first": "the first position",
    "first4": "the first four positions",
    "secondary_sink": "secondary sinks",
    "hard": "needles not asked about",
    "other": "other haystack tokens",
}
READ = (
    "P(an evidence token has more than one of the other class), ties ½, within an item, mean over items [95 %]; 0.5: "
    "the measure does not tell them apart; below: the other class has more. What is asked does not enter m, and ρ only "
    "by which heads look at a token: needles not asked about, the same sentence, are the test of both. A secondary "
    "sink has the first position's direction by definition, with it its value: that ρ finds it is partly circular."
)

__all__ = ["ANALYSIS", "compute", "main", "plan", "plot"]


class Plan(NamedTuple):
    """Everything that is decided before a run."""

    made: tuple[Made, ...]
    p: int = 1
    epsilon: float = 1e-4
    sink: float = SINK
    search: float = SEARCH


def plan(
    model: Any,
    task: str = ",".join(TASKS),
    norm: int = 1,
    epsilon: float = 1e-4,
    sink: float = SINK,
    search: float = SEARCH,
    **asked: Any,
) -> Plan:
    """Check everything that is asked for.

    Parameters
    ----------
    task
        Needle tasks, comma-separated, each once.
    norm, epsilon
        p of m = ‖V W_O‖_p, and ε of s^val.
    sink, search
        A head is a sink head where the first position's mass is above ``sink``, a search head where the evidence's is
        above ``search``.
    **asked
        Which items: see :func:`needle_items.options`; the same number of every task.
    """
    from kvprobe.errors import TaskError
    from kvprobe.sinks.scores import check_epsilon
    from kvprobe.theory.checks import check_p

    check_p(norm)
    check_epsilon(epsilon)
    for name, value in (("sink", sink), ("search", search)):
        if not 0 <= value < 1:
            raise TaskError(f"{name} is {value:g}, must be a mass from 0 to below 1")
    names = words(task)
    if not names or len({*names}) < len(names):
        raise TaskError(f"task is {task!r}, must be one or more tasks, comma-separated, each once")
    every = tuple(needles(model, {**asked, "task": name}, ITEMS) for name in names)
    return Plan(every, norm, epsilon, sink, search)


def compute(model: Any, asked: Plan) -> pd.DataFrame:
    """AUROC of evidence above every other class, by every measure, pooled and by layer.

    Returns
    -------
    DataFrame
        ``task``, ``contrast`` (:data:`sink_items.CONTRASTS`), ``measure``, ``layer`` (−1: all heads of the model
        pooled), ``mean`` over items of the AUROC within an item, ``low``, ``high``, ``n``, ``excluded`` (items without
        the class).
        ``attrs["tables"]``: ``items`` (the AUROCs), ``heads`` (mass on the first position, the evidence and other
        needles by head, mean over items, with ``sink`` and ``search``), ``kinds`` (how many heads are which; rank
        correlation of the masses over heads), ``secondary`` (labelled tokens with their text).
    """
    import pandas as pd

    parts: dict[str, list[pd.DataFrame]] = {"items": [], "heads": [], "secondary": []}
    for made in asked.made:
        for index, item in enumerate(progress(made.task)(list(made.items))):
            for name, table in looked_at(model, item, asked).items():
                table.insert(0, "task", made.task)
                table.insert(1, "item", index)
                parts[name].append(table)
    tables = {name: pd.concat(found, ignore_index=True) for name, found in parts.items()}
    seed = asked.made[0].seed
    tables["heads"], tables["kinds"] = by_head(tables["heads"], asked, seed)
    rows = over_items(tables["items"], seed)
    rows.attrs = {"tables": tables, "about": _about(model, asked)}
    return rows


def looked_at(model: Any, item: Item, asked: Plan) -> dict[str, pd.DataFrame]:
    """One item: AUROCs, masses by head on two sets of rows, and secondary sinks."""
    import pandas as pd

    from kvprobe import sinks

    whole, trace = observed(model, item)
    scores = sinks.scores(trace, asked.epsilon, asked.p)
    secondary = sinks.secondary_sinks(model, whole, trace, scores)
    keys = sorted_keys(item, trace.n, secondary.keys)
    answer = sinks.scores(trace, asked.epsilon, asked.p, rows=answer_rows(item))
    masses = [head_masses(each, keys).assign(rows=name) for name, each in (("suffix", scores), ("answer", answer))]
    labelled, texts = secondary.table(), whole.tokens(model)
    labelled["text"] = [texts[key] for key in labelled["position"]]
    return {"items": aurocs(scores, keys), "heads": pd.concat(masses, ignore_index=True), "secondary": labelled}


def aurocs(scores: Scores, keys: dict[str, list[int]]) -> pd.DataFrame:
    """One row a contrast × measure × layer: P(evidence token > token of the contrast) where both are seen."""
    import pandas as pd

    found = []
    for name, table in measures(scores).items():
        for contrast in CONTRASTS:
            for layer, values in enumerate(table, -1):
                auroc = _auroc(values, keys["evidence"], keys[contrast])
                found.append({"contrast": contrast, "measure": name, "layer": layer, "auroc": auroc})
    return pd.DataFrame(found)


def _auroc(values: Any, positive: list[int], negative: list[int]) -> float:
    """AUROC of the defined values; NaN where a class has none."""
    from kvprobe.stats import auroc

    more, less = (values[at] for at in (positive, negative))
    return auroc(more[more == more], less[less == less])


def head_masses(scores: Scores, keys: dict[str, list[int]]) -> pd.DataFrame:
    """One row a head: mean mass over the rows on the first position, on all evidence tokens, on other needles."""
    import numpy as np
    import pandas as pd

    mass = np.nan_to_num(scores.mass)
    layer, head = (grid.ravel() for grid in np.indices(mass.shape[:2]))
    columns = {"first": mass[..., scores.pad]}
    columns |= {name: mass[..., keys[name]].sum(-1) for name in ("evidence", "hard")}
    return pd.DataFrame({"layer": layer, "head": head} | {name: each.ravel() for name, each in columns.items()})


def over_items(items: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Means over the items of a task; a contrast that no item of a task has gives no row."""
    import pandas as pd

    keys = ["task", "contrast", "measure", "layer"]
    rows = [
        dict(zip(keys, names, strict=True)) | averaged(mine.tolist(), seed, "auroc")
        for names, mine in items.groupby(keys, sort=False)["auroc"]
    ]
    found = pd.DataFrame(rows)
    return found[found["n"] > 0].reset_index(drop=True)


def by_head(masses: pd.DataFrame, asked: Plan, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Heads with their mean masses and classes; and a row a task × rows that counts them."""
    import pandas as pd

    keys = ["task", "rows", "layer", "head"]
    heads = masses.groupby(keys, sort=False)[["first", "evidence", "hard"]].mean().reset_index()
    heads["sink"], heads["search"] = heads["first"] > asked.sink, heads["evidence"] > asked.search
    kinds = []
    for (task, rows), mine in heads.groupby(["task", "rows"], sort=False):
        raw = masses[(masses["task"] == task) & (masses["rows"] == rows)]
        rho = [spearman(one["first"], one["evidence"]) for _, one in raw.groupby("item")]
        correlation = {f"rho_{name}": value for name, value in averaged(rho, seed, "correlation").items()}
        kinds.append({"task": task, "rows": rows} | counted(mine) | correlation)
    return heads, pd.DataFrame(kinds)


def counted(heads: pd.DataFrame) -> dict[str, Any]:
    """How many heads are sinks, search, or both; and how many would be both if the two had nothing to do together."""
    sink, search = heads["sink"], heads["search"]
    both, expected = int((sink & search).sum()), float(sink.mean() * search.sum())
    counts = {"n_heads": len(heads), "sink": int(sink.sum()), "search": int(search.sum()), "both": both}
    return counts | {"expected": expected, "lift": both / expected if expected else float("nan")}


def _about(model: Any, asked: Plan) -> dict[str, Any]:
    about = together([made.about(model) for made in asked.made])
    settings = {"norm": asked.p, "epsilon": asked.epsilon, "sink": asked.sink, "search": asked.search}
    return about | settings | {"semantics": SEMANTICS, "exploratory": True}


def plot(df: pd.DataFrame) -> Figure:
    """AUROC by contrast and measure, the same by layer, and heads by mass on the first position and on evidence."""
    from sink_figures import sink_or_search

    return sink_or_search(df, CLASSES, MEASURES)


def report(df: pd.DataFrame) -> None:
    """Print the tables for a person."""
    about, tables = df.attrs["about"], df.attrs["tables"]
    print(f"{subtitle(about)} each\n{about['semantics']}; L{about['norm']} norm; exploratory\n\n{READ}")
    pooled = df[df["layer"] == -1]
    for (task, contrast), rows in pooled.groupby(["task", "contrast"], sort=False):
        print(f"\n{task}: evidence above {CLASSES[contrast]}")
        for row in rows.to_dict("records"):
            print(f"  {MEASURES[row['measure']]:40s} {said(row):22s} n {row['n']}  {_layers(df, row)}")
    for task, rows in tables["secondary"].groupby("task", sort=False):
        found = rows.drop_duplicates(["item", "position"])["text"].value_counts()
        layers = sorted(rows["layer"].unique())
        named = ", ".join(f"{text!r} {count}" for text, count in found.head(5).items())
        print(f"\n{task}: {found.sum()} secondary sinks in layers {layers[0]}–{layers[-1]}: {named}")
    print(f"\nheads: sink, first position > {about['sink']:g}; search, evidence > {about['search']:g} of the attention")
    for row in tables["kinds"].to_dict("records"):
        print(_kinds(row))


def _layers(df: pd.DataFrame, row: dict[str, Any]) -> str:
    """In how many layers the measure is above ½."""
    keys = ["task", "contrast", "measure"]
    mine = df[(df["layer"] >= 0) & (df[keys] == [row[key] for key in keys]).all(axis=1)]
    return f"above ½ in {int((mine['mean'] > 0.5).sum())} of {len(mine)} layers"


def _kinds(row: dict[str, Any]) -> str:
    rho = said({"mean": row["rho_mean"], "low": row["rho_low"], "high": row["rho_high"]})
    return (
        f"  {row['task']}, {row['rows']} rows: {row['sink']} sink, {row['search']} search, {row['both']} both "
        f"({row['expected']:.1f} if independent) of {row['n_heads']}; rank correlation of the masses over heads {rho}"
    )


def _options(parser: argparse.ArgumentParser) -> None:
    needle_options(parser, ITEMS, ",".join(TASKS))
    parser.add_argument("--norm", type=int, default=1, help="p of m = ‖V W_O‖_p (%(default)s)")
    parser.add_argument("--epsilon", type=float, default=1e-4, help="ε of s^val (%(default)s)")
    parser.add_argument(
        "--sink", type=float, default=SINK, help="mass on the first position of a sink head (%(default)s)"
    )
    parser.add_argument("--search", type=float, default=SEARCH, help="evidence mass of a search head (%(default)s)")


ANALYSIS = Analysis("sink_or_search", (__doc__ or "").splitlines()[0], _options, plan, compute, plot, report)
main = ANALYSIS.main

if __name__ == "__main__":
    sys.exit(main())

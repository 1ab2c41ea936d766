"""Do heads that copy the answer rest on the first position, and is it their output that losing the evidence changes?

    python analyses/head_roles.py --out out/head_roles

Every head of the model on one plane: retrieval score (Wu et al., arXiv 2404.15574) on a small grid; and, on other
items, the mass on the first position, the mass on the evidence, the exact change L of the head's own output when the
evidence is cut in it alone, and, with ``--knockouts``, what that really does to the answer. Exploratory. Writes
``rows.parquet`` (a row a head), ``pairs.parquet`` (a row a pair of quantities), ``items.parquet`` (a row an item ×
head), the figure and a manifest.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from common import Analysis, progress, words
from needle_items import Made, numbers, subtitle
from sink_items import SEMANTICS, averaged, needle_options, needles, observed, said, spearman

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvprobe.heads import Grid
    from kvprobe.tasks.items import Item

ITEMS, LENGTH = 8, 1500
LENGTHS, DEPTHS = ("300", "900", "1500"), ("0", "50", "100")
SINK, COPY, RECALL = 0.3, 0.1, 0.5
QUANTITIES = {
    "retrieval": "retrieval score",
    "first": "mass on the first position",
    "evidence": "mass on the evidence",
    "perturbation": "exact L of cutting the evidence in the head",
    "effect": "|Δ ln p| of the answer, measured",
    "kl": "KL, measured",
}
MEASURED = ("delta_logprob", "effect", "kl")
READ = (
    "Spearman over heads within an item, mean over items [95 %]; the retrieval score is one number a head from the "
    "scan's own trials, so intervals hold it fixed. within layers: over the heads of one layer, mean over layers."
)

__all__ = ["ANALYSIS", "compute", "main", "plan", "plot"]


class Plan(NamedTuple):
    """Everything that is decided before a run; of the first ``knockouts`` items single heads are masked."""

    made: Made
    grid: Grid
    knockouts: int = 0
    p: int = 1
    sink: float = SINK
    copy: float = COPY
    recall: float = RECALL


def plan(
    model: Any,
    lengths: tuple[str, ...] = LENGTHS,
    depths: tuple[str, ...] = DEPTHS,
    knockouts: int = 0,
    norm: int = 1,
    sink: float = SINK,
    copy: float = COPY,
    recall: float = RECALL,
    **asked: Any,
) -> Plan:
    """Check everything that is asked for.

    Parameters
    ----------
    lengths, depths
        Of the grid of the retrieval score: tokens, and per cent.
    knockouts
        Number of items on which the evidence is masked in one head at a time.
    norm
        p of L.
    sink, copy
        A head is a sink head where the first position's mass is above ``sink``, a copying head where its retrieval
        score is at least ``copy``.
    recall
        A trial of the grid counts where the answer's ROUGE-1 recall is above this.
    **asked
        Which items: see :func:`needle_items.options`.
    """
    from kvprobe.errors import TaskError
    from kvprobe.heads import Grid
    from kvprobe.theory.checks import check_p

    check_p(norm)
    for name, value in (("sink", sink), ("copy", copy)):
        if not 0 <= value < 1:
            raise TaskError(f"{name} is {value:g}, must be a share from 0 to below 1")
    given = dict(asked)
    options = {"needles": given.get("needles"), "path": given.get("haystack")}
    made = needles(model, given, ITEMS, LENGTH)
    if not 0 <= knockouts <= len(made.items):
        raise TaskError(f"knockouts is {knockouts}, must be from 0 to the {len(made.items)} items")
    sizes, places = numbers("lengths", lengths, int), numbers("depths", depths, float)
    more = {name: value for name, value in options.items() if value is not None}
    grid = Grid(made.task, tuple(sizes), tuple(places), seeds=(made.seed,), options=more)
    for cell in grid.cells():
        grid.item(model, cell)
    return Plan(made, grid, knockouts, norm, sink, copy, recall)


def compute(model: Any, asked: Plan) -> pd.DataFrame:
    """All heads with their quantities, and how these rank heads alike.

    Returns
    -------
    DataFrame
        One row a head: ``layer``, ``head``, ``retrieval`` (mean over the answered trials of the grid), and means over
        items of ``first``, ``evidence`` (share of attention), ``perturbation`` (L of the head's own output, mean over
        question and answer rows), and where heads were knocked out ``delta_logprob``, ``effect`` (|Δ ln p| of the
        answer, nats), ``kl`` (nats); ``sink``, ``copy``. ``attrs["tables"]``: ``pairs`` (``first``, ``second``;
        ``mean``, ``low``, ``high``, ``n`` of Spearman over all heads, ``within_…`` over those of one layer), ``items``.
    """
    import pandas as pd

    from kvprobe import heads

    trials = heads.scan(model, asked.grid, progress=progress("trials"))
    scores = heads.gather(trials, threshold=asked.recall)
    parts = []
    for index, item in enumerate(progress("items")(list(asked.made.items))):
        parts.append(head_rows(model, item, asked, index < asked.knockouts).assign(item=index))
    items = pd.concat(parts, ignore_index=True)
    items["retrieval"] = scores.scores[items["layer"], items["head"]]
    rows = items.groupby(["layer", "head"])[_columns(items)].mean().reset_index()
    rows["sink"], rows["copy"] = rows["first"] > asked.sink, rows["retrieval"] >= asked.copy
    about = asked.made.about(model) | {"trials": scores.n, "answered_trials": scores.n_kept, "norm": asked.p}
    about |= {"knockouts": asked.knockouts, "semantics": SEMANTICS, "exploratory": True}
    about |= {"sink": asked.sink, "copy": asked.copy, "lengths": [*asked.grid.lengths], "depths": [*asked.grid.depths]}
    rows.attrs = {"tables": {"pairs": pairs(items, asked.made.seed), "items": items}, "about": about}
    return rows


def _columns(items: pd.DataFrame) -> list[str]:
    return [name for name in (*QUANTITIES, "delta_logprob") if name in items]


def head_rows(model: Any, item: Item, asked: Plan, knocked: bool) -> pd.DataFrame:
    """One item: masses and L of every head of the clean run, and the measured effects where heads are knocked out."""
    import numpy as np
    import pandas as pd

    from kvprobe import heads, sinks
    from kvprobe.heads.single_heads import closed_forms

    _, trace = observed(model, item)
    spans = [*item.spans["evidence"]]
    mass, closed = np.nan_to_num(sinks.scores(trace, p=asked.p).mass), closed_forms(trace, spans, asked.p)
    layer, head = (grid.ravel() for grid in np.indices(mass.shape[:2]))
    found = pd.DataFrame({"layer": layer, "head": head, "first": mass[..., item.prompt.pad].ravel()})
    found["evidence"], found["perturbation"] = closed["mass"].ravel(), closed["perturbation"].ravel()
    if knocked:
        prefix = trace.prefix(item.context_stop - item.prompt.pad)
        effects = heads.knockouts(model, item, p=asked.p, prefix=prefix)
        found["delta_logprob"], found["kl"] = effects["delta_logprob"], effects["kl"]
        found["effect"] = found["delta_logprob"].abs()
    return found


def pairs(items: pd.DataFrame, seed: int) -> pd.DataFrame:
    """One row a pair of quantities: Spearman over heads within an item, mean over the items that have both."""
    import pandas as pd

    names = [name for name in QUANTITIES if name in items]
    every = [mine for _, mine in items.groupby("item")]
    found = []
    for first, second in itertools.combinations(names, 2):
        both = [mine for mine in every if mine[[first, second]].notna().all(axis=None)]
        row = averaged([spearman(mine[first], mine[second]) for mine in both], seed, "correlation")
        inside = averaged([within_layers(mine, first, second) for mine in both], seed, "correlation")
        found.append({"first": first, "second": second} | row | {f"within_{name}": inside[name] for name in inside})
    return pd.DataFrame(found)


def within_layers(heads: pd.DataFrame, first: str, second: str) -> float:
    """Spearman over the heads of one layer, mean over the layers in which both vary; NaN where there is none."""
    import numpy as np

    found = np.array([spearman(mine[first], mine[second]) for _, mine in heads.groupby("layer")])
    kept = found[~np.isnan(found)]
    return float(kept.mean()) if kept.size else float("nan")


def plot(df: pd.DataFrame) -> Figure:
    """Heads by mass on the first position and retrieval score, L as size and colour; beside it all correlations."""
    from role_figures import head_roles

    return head_roles(df, QUANTITIES)


def report(df: pd.DataFrame) -> None:
    """Print the tables for a person."""
    about, found = df.attrs["about"], df.attrs["tables"]["pairs"]
    print(f"{subtitle(about)}\n{about['semantics']}; L{about['norm']} norm; exploratory")
    print(
        f"retrieval score: {about['answered_trials']} of {about['trials']} trials answered, lengths "
        f"{about['lengths']}, depths {about['depths']} %; knockouts on {about['knockouts']} items\n\n{READ}\n"
    )
    for row in found.to_dict("records"):
        inside = {name: row[f"within_{name}"] for name in ("mean", "low", "high")}
        names = f"{QUANTITIES[row['first']]} × {QUANTITIES[row['second']]}"
        print(f"  {names:86s} {said(row, '+.2f'):22s} n {row['n']}  within layers {said(inside, '+.2f')}")
    print("\n" + classes(df))
    for name in (name for name in ("retrieval", "perturbation", "effect") if name in df):
        best = df.sort_values(name, ascending=False, kind="stable").head(10)
        print(f"most {QUANTITIES[name]}: " + ", ".join(_head(row, name) for row in best.to_dict("records")))


def classes(df: pd.DataFrame) -> str:
    """How many copying heads are sink heads, and how much of L is in either."""
    about, both = df.attrs["about"], df["sink"] & df["copy"]
    expected = df["sink"].mean() * df["copy"].sum()
    share = {name: df.loc[df[name], "perturbation"].sum() / df["perturbation"].sum() for name in ("copy", "sink")}
    return (
        f"{df['copy'].sum()} of {len(df)} heads copy (score ≥ {about['copy']:g}), {df['sink'].sum()} are sinks (first "
        f"position > {about['sink']:g}), {both.sum()} both ({expected:.1f} if independent); copying heads have "
        f"{100 * share['copy']:.0f} %, sink heads {100 * share['sink']:.0f} % of all L"
    )


def _head(row: dict[str, Any], name: str) -> str:
    return f"{row['layer']}.{row['head']} {row[name]:.3g} (first {row['first']:.2f})"


def _options(parser: argparse.ArgumentParser) -> None:
    needle_options(parser, ITEMS, length=LENGTH)
    for option, default in (("lengths", LENGTHS), ("depths", DEPTHS)):
        text = f"{option} of the retrieval score's grid ({','.join(default)})"
        parser.add_argument(f"--{option}", type=words, default=default, help=text)
    parser.add_argument("--knockouts", type=int, default=0, help="items on which single heads are masked (%(default)s)")
    parser.add_argument("--norm", type=int, default=1, help="p of L (%(default)s)")
    parser.add_argument(
        "--sink", type=float, default=SINK, help="mass on the first position of a sink head (%(default)s)"
    )
    parser.add_argument("--copy", type=float, default=COPY, help="retrieval score of a copying head (%(default)s)")
    parser.add_argument("--recall", type=float, default=RECALL, help="a trial counts above this recall (%(default)s)")


ANALYSIS = Analysis("head_roles", (__doc__ or "").splitlines()[0], _options, plan, compute, plot, report)
main = ANALYSIS.main

if __name__ == "__main__":
    sys.exit(main())

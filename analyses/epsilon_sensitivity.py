"""Which conclusions depend on ε of (A + ε) ‖V W_O‖?

    python analyses/epsilon_sensitivity.py --out out/epsilon_sensitivity

ε is a constant (1e-4 in CriticalKV, arXiv 2502.03805) added to an attention whose mean over n keys is 1 / n. Within
needle items, for every ε: (a) value mass s^val = (s + ε) m: who has more, and which tokens lead; (b) ρ with ε inside,
m (1 + ε/s): does it rank by value or by rarity; (c) the second stage of eviction: the perturbation L of every head, and
which entries are kept. Exploratory. Writes ``rows.parquet`` (a row an ε × quantity), ``items.parquet`` (an item each),
``conclusions.parquet`` (a sentence an ε), the figure and a manifest.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from common import Analysis, progress, words
from epsilon_overlaps import leading, overlap
from epsilon_verdicts import conclusions
from needle_items import Made, numbers, subtitle
from sink_items import averaged, log_ratio, needle_options, needles, observed, said, sorted_keys

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvprobe.audits import Sweep
    from kvprobe.tasks.document import Document
    from kvprobe.tasks.items import Item

ITEMS = 8
EPSILONS = ("0", "1e-6", "1e-5", "1e-4", "1e-3", "1e-2")
CACHES = ("0.1", "0.2")
REFERENCE = 1e-4
TOP = 0.05
PARTS = ("top_pooled", "top_heads", "kept", "kept_second", "evidence_kept")
"""Quantities in [0, 1] that some ε fixes by construction: their intervals stay there, and have no width there."""
KINDS = {"auroc": "auroc"} | dict.fromkeys(PARTS, "part") | dict.fromkeys(("order", "rarity", "value"), "correlation")
SEMANTICS = (
    "value masses and ρ: clean runs, means over question and teacher-forced answer rows; second stage: the context is "
    "compressed with the question unseen, each layer by itself, L at the probe row"
)
READ = (
    "auroc: P(s^val of an evidence token > of a first4 token), heads pooled. order, top_…: rank correlation with ε = 0 "
    "within a head, shared part of the top tokens (heads pooled; within a head). ratio: rank correlation within a head "
    "of m (1 + ε/s) with −s and with m. selector: L against the reference ε and against no second stage (mean over "
    "heads, per cent); part of the entries kept at the reference that is kept here, too, of all and of those of the "
    "second stage; part of the evidence kept. [95 % over items]"
)

__all__ = ["ANALYSIS", "compute", "main", "plan", "plot"]


class Plan(NamedTuple):
    """Everything that is decided before a run."""

    made: Made
    epsilons: tuple[float, ...]
    sweep: Sweep
    caches: tuple[str, ...] = CACHES
    probe: str = "first_decoded"
    reference: float = REFERENCE
    top: float = TOP
    p: int = 1

    def document(self, index: int) -> Document:
        """An item as a document: its context is what is compressed."""
        from kvprobe.tasks.document import Document

        item = self.made.items[index]
        return Document(f"item {index}", item.prompt, item.context_stop)


def plan(
    model: Any,
    epsilons: tuple[str, ...] = EPSILONS,
    reference: float = REFERENCE,
    caches: tuple[str, ...] = CACHES,
    base: str = "snapkv",
    preset: str = "paper",
    probe: str = "first_decoded",
    top: float = TOP,
    norm: int = 1,
    **asked: Any,
) -> Plan:
    """Check everything that is asked for.

    Parameters
    ----------
    epsilons, reference
        Values of ε, and the one among them that the second stage's choices are held against.
    caches, base, preset, probe
        Of the second stage: shares of the context to keep, the policy below it and its pooling, the row that L is of.
    top
        Share of a head's tokens that lead.
    norm
        p of m, of L and of the selector.
    **asked
        Which items: see :func:`needle_items.options`.
    """
    from kvprobe.audits import Sweep
    from kvprobe.audits.sweeps import refuse_sweep
    from kvprobe.cells import pairs_of
    from kvprobe.errors import TaskError
    from kvprobe.sinks.scores import check_epsilon
    from kvprobe.theory.checks import check_p

    check_p(norm)
    values = tuple(check_epsilon(value) for value in numbers("epsilons", epsilons, float))
    if reference not in values:
        raise TaskError(f"reference is {reference:g}, must be one of epsilons ({','.join(epsilons)})")
    if not 0 < top < 1:
        raise TaskError(f"top is {top:g}, must be a share between 0 and 1")
    if "two_stage" in base:
        raise TaskError(f"base {base} has a second stage already, must be a policy without one")
    (pair,) = pairs_of(base, f"{base}+two_stage", (preset,), p=norm)
    made = needles(model, dict(asked), ITEMS)
    found = Plan(made, values, Sweep("epsilon", pair, values), tuple(caches), probe, reference, top, norm)
    refuse_sweep(model, [found.document(index) for index in range(len(made.items))], found.sweep, probe, found.caches)
    return found


def compute(model: Any, asked: Plan) -> pd.DataFrame:
    """Every quantity under every ε: means over items.

    Returns
    -------
    DataFrame
        ``part`` (``value_mass``, ``ratio``, ``selector``), ``quantity``, ``cache`` (NaN but for the selector),
        ``epsilon``, ``mean``, ``low``, ``high``, ``n``, ``excluded``. Quantities: ``auroc``, ``order``,
        ``top_pooled``, ``top_heads``; ``mass first4``, ``… evidence``, ``… other`` (Σ s^val over a bucket, mean over
        heads); ``evidence / first4``, ``evidence / other`` (log2 of the ratio of these sums) and the same ``per
        token``; ``rarity``, ``value`` (rank correlation of ρ_ε with −s and m); ``L``, ``change`` (per cent of L at the
        reference ε), ``gain`` (per cent of L without a second stage), ``kept``, ``kept_second``, ``evidence_kept``.
        ``attrs["tables"]``: ``items``, ``conclusions``.
    """
    import pandas as pd

    parts = []
    for index in progress("items")(list(range(len(asked.made.items)))):
        item = asked.made.items[index]
        found = [*value_rows(model, item, asked), *selector_rows(model, item, index, asked)]
        parts.append(pd.DataFrame(found).assign(item=index))
    items = pd.concat(parts, ignore_index=True)
    rows = over_items(items, asked.made.seed)
    about = asked.made.about(model) | {"semantics": SEMANTICS, "exploratory": True, "norm": asked.p}
    about |= {"reference": asked.reference, "top": asked.top, "caches": [*asked.caches], "probe": asked.probe}
    about |= {"base": asked.sweep.pair.base.name, "preset": asked.sweep.pair.preset}
    about["context"] = sum(item.context_stop for item in asked.made.items) / len(asked.made.items)
    rows.attrs = {"tables": {"items": items, "conclusions": conclusions(rows, asked.reference)}, "about": about}
    return rows


def value_rows(model: Any, item: Item, asked: Plan) -> list[dict[str, Any]]:
    """Parts (a) and (b) of one item."""
    from kvprobe import sinks

    _, trace = observed(model, item)
    scores = sinks.scores(trace, p=asked.p)
    spans = {"evidence": item.spans["evidence"], "context_stop": item.context_stop, "pad": item.prompt.pad}
    buckets, keys = sinks.buckets(trace.n, **spans), sorted_keys(item, trace.n)
    found = []
    for row in sinks.epsilon_sweep(scores, buckets, asked.epsilons):
        values = {"auroc": row["auroc"], "order": row["spearman_value_mass"]}
        values |= leading(scores, row["epsilon"], asked.top) | compared(row, keys)
        found += [_row("value_mass", name, row["epsilon"], value) for name, value in values.items()]
        inside = {"rarity": row["spearman_ratio_mass"], "value": row["spearman_ratio_norm"]}
        found += [_row("ratio", name, row["epsilon"], value) for name, value in inside.items()]
    return found


def _row(part: str, quantity: str, epsilon: float, value: float | None, cache: float = float("nan")) -> dict[str, Any]:
    value = float("nan") if value is None else value
    return {"part": part, "quantity": quantity, "cache": cache, "epsilon": epsilon, "value": value}


def compared(row: dict[str, Any], keys: dict[str, list[int]]) -> dict[str, float]:
    """Value masses of buckets, and how much more the evidence has (log2; NaN where windows hide either)."""
    sums, each = row["value_mass"], row["value_mass_per_token"]
    found = {f"mass {name}": sums[name] for name in ("first4", "evidence", "other")}
    for other in ("first4", "other"):
        for label, table in (("", sums), (" per token", each)):
            found[f"evidence / {other}{label}"] = log_ratio(table["evidence"], table[other])
    return found


def selector_rows(model: Any, item: Item, index: int, asked: Plan) -> list[dict[str, Any]]:
    """Part (c) of one item: one prefill, every ε × cache size from it."""
    from kvprobe import cells
    from kvprobe.audits.sweeps import refuse_sweep
    from kvprobe.eviction.policies import ratio

    document = asked.document(index)
    arms = refuse_sweep(model, [document], asked.sweep, asked.probe, asked.caches)
    base, *ours = [asked.sweep.pair.base, *asked.sweep.policies]
    probed = cells.probe(model, document, [base, *ours], asked.probe)
    choices = cells.choose(probed, arms)
    heads = cells.measure(probed, arms, p=asked.p, choices=choices).heads
    L = heads.groupby(["policy", "cache"])["perturbation"].mean()
    keep = {(arm.policy.name, arm.cache): choice.keep for arm, choice in zip(arms, choices, strict=True)}
    evidence = [key - item.prompt.pad for start, stop in item.spans["evidence"] for key in range(start, stop)]
    names = dict(zip(asked.sweep.taken, (policy.name for policy in ours), strict=True))
    found = []
    for cache in asked.caches:
        share, reference = float(ratio(cache)), names[asked.reference]
        stage1 = ours[0].first_stage(probed.measured.scored(ours[0]), cache)
        for epsilon, name in names.items():
            mine = float(L[name, share])
            values = {
                "L": mine,
                "change": percent(mine, float(L[reference, share])),
                "gain": percent(mine, float(L[base.name, share])),
                **overlap(keep[name, cache], keep[reference, cache], stage1, evidence),
            }
            found += [_row("selector", what, epsilon, value, share) for what, value in values.items()]
    return found


def percent(mine: float, other: float) -> float:
    """Change against another L in per cent; NaN where nothing is lost there, because windows hide what is evicted."""
    return 100 * (mine / other - 1) if other else float("nan")


def over_items(items: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Means over items."""
    import pandas as pd

    keys = ["part", "quantity", "cache", "epsilon"]
    return pd.DataFrame(
        [
            dict(zip(keys, names, strict=True)) | averaged(mine.tolist(), seed, KINDS.get(names[1], "mean"))
            for names, mine in items.groupby(keys, sort=False, dropna=False)["value"]
        ]
    )


def plot(df: pd.DataFrame) -> Figure:
    """Value mass, ρ and the second stage by ε."""
    from epsilon_figures import epsilon_sensitivity

    return epsilon_sensitivity(df)


def report(df: pd.DataFrame) -> None:
    """Print the tables for a person."""
    about = df.attrs["about"]
    print(f"{subtitle(about)}; exploratory\n{about['semantics']}\n{READ}")
    print(f"mean attention of a key: about 1 / {about['context']:.0f} = {1 / about['context']:.1g}")
    for (part, quantity, cache), rows in df.groupby(["part", "quantity", "cache"], sort=False, dropna=False):
        where = "" if cache != cache else f" at {100 * cache:g} %"
        form = ".3g" if quantity == "L" or quantity.startswith("mass") else "+.2f"
        cells = "  ".join(f"{row['epsilon']:g}: {said(row, form)}" for row in rows.to_dict("records"))
        print(f"\n  {part}: {quantity}{where}\n    {cells}")
    print(f"\nin one line each ({about['base']} + two_stage, {about['preset']}):")
    for row in df.attrs["tables"]["conclusions"].to_dict("records"):
        print(f"  ε = {row['epsilon']:g}: {row['text']}")


def _options(parser: argparse.ArgumentParser) -> None:
    needle_options(parser, ITEMS)
    for option, default in (("epsilons", EPSILONS), ("caches", CACHES)):
        parser.add_argument(f"--{option}", type=words, default=default, help=f"comma-separated ({','.join(default)})")
    parser.add_argument(
        "--reference", type=float, default=REFERENCE, help="ε that choices are held against (%(default)s)"
    )
    parser.add_argument("--base", default="snapkv", help="policy below the second stage (%(default)s)")
    parser.add_argument("--preset", default="paper", help="its pooling: paper or released (%(default)s)")
    parser.add_argument("--probe", default="first_decoded", help="row of L: first_decoded or last_prompt (%(default)s)")
    parser.add_argument("--top", type=float, default=TOP, help="share of tokens that lead (%(default)s)")
    parser.add_argument("--norm", type=int, default=1, help="p of m and L (%(default)s)")


ANALYSIS = Analysis("epsilon_sensitivity", (__doc__ or "").splitlines()[0], _options, plan, compute, plot, report)
main = ANALYSIS.main

if __name__ == "__main__":
    sys.exit(main())

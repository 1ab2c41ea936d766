"""Where do "not in the cache" (mask) and "there, but silent" (value gate) disagree, over layers?

    python analyses/mask_against_gate.py --out out/mask_against_gate

Both act on the asked needle of needle items, for question and answer tokens: on all layers, on one layer at a time, on
all layers up to one, on all layers from one on. Exploratory: no layer was named beforehand. Writes ``rows.parquet`` (a
row a design × layer × outcome), ``arms.parquet`` (a row an item × arm), ``closed_forms.parquet`` (a row an item ×
layer), the figure and a manifest.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from common import Analysis, progress
from needle_items import Made, ends, entered, made, options, ran

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvprobe.tasks.items import Item

ITEMS = 12
STEP = 2
KINDS = ("mask", "gate")
OUTCOMES = ("delta_logprob", "kl")
FORMS = ("perturbation", "gate_perturbation", "refill")
DESIGNS = {"one": "this layer alone", "up_to": "all layers up to this one", "from": "this layer and all after it"}

__all__ = ["ANALYSIS", "compute", "main", "plan", "plot"]


class Plan(NamedTuple):
    """Everything that is decided before a run: items, designs (name, layer, layers), and which items enter means."""

    made: Made
    designs: tuple[tuple[str, int, tuple[int, ...]], ...]
    every: bool = False
    p: int = 1


def plan(model: Any, step: int = STEP, every: bool = False, norm: int = 1, **asked: Any) -> Plan:
    """Check everything that is asked for.

    Parameters
    ----------
    step
        Cumulative designs stand at every ``step``-th layer.
    every
        Let items enter that the model does not answer; else they are run, stored and counted only.
    norm
        p of the closed forms.
    **asked
        Which items: see :func:`needle_items.options`.
    """
    from kvprobe.errors import TaskError
    from kvprobe.theory.checks import check_p

    check_p(norm)
    if step < 1:
        raise TaskError(f"step is {step}, must be at least 1")
    return Plan(made(model, asked, ITEMS), designs_of(model.geometry.n_layers, step), every, norm)


def designs_of(n_layers: int, step: int) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    """Designs as (name, layer, layers acted on); ``all`` has layer −1."""
    each, some = range(n_layers), range(0, n_layers, step)
    last = n_layers - 1
    ups = sorted({*(last - at for at in some)})  # ends with all layers, as "from" begins with all
    found = [("all", -1, tuple(each)), *(("one", at, (at,)) for at in each)]
    found += [("up_to", at, tuple(range(at + 1))) for at in ups]
    return (*found, *(("from", at, tuple(range(at, n_layers))) for at in some))


def compute(model: Any, asked: Plan) -> pd.DataFrame:
    """Effects of both interventions by design and layer, and their paired difference.

    Returns
    -------
    DataFrame
        ``design`` (``all``, ``one``, ``up_to``, ``from``), ``layer`` (−1 for ``all``), ``outcome`` (``delta_logprob``:
        change of ln p of the gold answer; ``kl``: KL(clean ‖ arm) summed over answer tokens; nats), ``mask``,
        ``gate``, ``difference`` (mask − gate): means over items with ``_low``, ``_high``; ``p`` (sign flip over items),
        ``p_bh`` (Benjamini–Hochberg over the layers of a design and outcome), ``p_attainable``; ``n``. Beside each
        layer ``perturbation`` ‖a_S z′ − u_S‖, ``gate_perturbation`` ‖u_S‖ and ``refill`` ‖a_S z′‖, after W_O and summed
        over heads, mean over rows and items, of the clean run. ``attrs["tables"]``: ``arms``, ``closed_forms``.
    """
    import pandas as pd

    arms, forms = [], []
    for index, item in enumerate(progress("items")(list(asked.made.items))):
        some, closed = item_rows(model, item, asked)
        arms.append(some.assign(item=index))
        forms.append(closed.assign(item=index))
    tables = {"arms": pd.concat(arms, ignore_index=True), "closed_forms": pd.concat(forms, ignore_index=True)}
    chosen = {name: entering(table, asked.every) for name, table in tables.items()}
    table = compared(chosen["arms"], asked.made.seed).merge(
        chosen["closed_forms"].groupby("layer")[[*FORMS]].mean().reset_index(), on="layer", how="left"
    )
    answered = int(tables["closed_forms"].groupby("item")["answered"].first().sum())
    about = asked.made.about(model) | {"answered": answered, "entering": int(table["n"].iloc[0]), "norm": asked.p}
    about["agreement"] = agreement(chosen["arms"], chosen["closed_forms"], asked.made.seed)
    table.attrs = {"tables": tables, "about": about}
    return table


def entering(rows: pd.DataFrame, every: bool) -> pd.DataFrame:
    """Rows of the items that enter means."""
    from kvprobe.errors import TaskError

    found = rows if every else rows[rows["answered"]]
    if found.empty:
        raise TaskError(f"none of {rows['item'].nunique()} items is answered by the clean run; allowed: --every")
    return found


def item_rows(model: Any, item: Item, asked: Plan) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Arms and closed forms of one item; all arms in one call, over the prefix that the clean trace holds."""
    import pandas as pd

    from kvprobe import runs
    from kvprobe.interventions import KVMask, ValueGate

    spans, ids = [*item.spans["evidence"]], list(item.answer_ids)
    rows = list(range(item.context_stop, len(item.prompt) + len(ids)))
    trace = runs.observe(model, item.prompt.extended(item.answer_ids), rows)
    parts = [(KVMask(spans, layers=at), ValueGate(spans, 0.0, layers=at)) for _, _, at in asked.designs]
    given = [(), *(each for pair in parts for each in pair)]
    prefix = trace.prefix(item.context_stop - item.prompt.pad)
    clean, *found = ran(model, item, given, prefix)
    names = [(design, layer, kind) for design, layer, _ in asked.designs for kind in KINDS]
    effects = [
        {"design": design, "layer": layer, "kind": kind} | effect(out, clean, ids)
        for (design, layer, kind), out in zip(names, found, strict=True)
    ]
    answered = answers(model, item, prefix)
    return (
        pd.DataFrame(effects).assign(answered=answered),
        closed_forms(trace, spans, asked.p).assign(answered=answered),
    )


def answers(model: Any, item: Item, prefix: Any) -> bool:
    """Whether the clean run, decoding freely, writes all of the item's values."""
    from kvprobe import runs
    from kvprobe.tasks.scoring import string_match_all

    more: dict[str, Any] = {
        "suffix": len(item.prompt) - item.context_stop,
        "generate": len(item.answer_ids) + 8,
        "keep_trace": False,
    }
    (clean,) = runs.intervene(model, item.prompt, [()], prefix=prefix, **more)
    text = model.tokenizer.decode(clean.generated, skip_special_tokens=True)
    return float(string_match_all(text, item.references)) == 1.0


def effect(out: Any, clean: Any, ids: list[int]) -> dict[str, float]:
    """What an arm does to the teacher-forced answer; the last row of logits lies behind it."""
    from kvprobe.outcomes import answer_logprobs, kl_divergence

    mine, theirs = (float(answer_logprobs(each.logits[:-1], ids).double().sum()) for each in (out, clean))
    kl = float(kl_divergence(clean.logits[:-1], out.logits[:-1]).double().sum())
    return {"delta_logprob": mine - theirs, "kl": kl}


def closed_forms(trace: Any, spans: list[tuple[int, int]], p: int = 1) -> pd.DataFrame:
    """What both do to each layer's attention output on the clean run's rows; one row a layer.

    Of the layer's output, Σ_h (·)_h W_O^h, mean over rows: ``perturbation`` ‖a_S z′ − u_S‖ (mask, law 4 of the theory),
    ``gate_perturbation`` ‖u_S‖ (gate at 0, law 10), and what lies between the two, ``refill`` ‖a_S z′‖: the output that
    survivors get in the place of what was cut. ``mass``: a_S, mean over heads and rows.
    """
    import pandas as pd
    import torch

    from kvprobe.theory.perturbation import norm

    found = []
    for view in trace.layers():
        A, sink = view.rows()
        heads = A.double().unflatten(0, (len(view.values), -1)).flatten(1, 2)  # [K, G·Q, n]
        inside = torch.zeros(A.shape[-1], dtype=torch.bool)
        for start, stop in spans:
            inside[start:stop] = True
        V = view.values.double()
        u_S, u_N = heads[..., inside] @ V[:, inside], heads[..., ~inside] @ V[:, ~inside]
        a_S, R = heads[..., inside].sum(-1, keepdim=True), heads[..., ~inside].sum(-1, keepdim=True)
        if sink is not None:
            R = R + sink.double().unflatten(0, (len(V), -1)).reshape(len(V), -1, 1)
        refill = a_S * u_N / R
        vectors = {"perturbation": refill - u_S, "gate_perturbation": u_S, "refill": refill}
        row = {name: float(norm(_projected(x, view), p).mean()) for name, x in vectors.items()}
        found.append({"layer": view.index, **row, "mass": float(a_S.mean())})
    return pd.DataFrame(found)


def _projected(x: Any, view: Any) -> Any:
    """Σ_h x_h W_O^h, [Q, D], of [K, G·Q, d]."""
    import torch

    by_head = x.unflatten(1, (-1, len(view.queries))).flatten(0, 1)  # [H, Q, d]
    return torch.einsum("hqd,hde->qe", by_head, view.w_o.double())


def compared(arms: pd.DataFrame, seed: int) -> pd.DataFrame:
    """One row a design × layer × outcome: both interventions and their difference within items."""
    import pandas as pd

    from kvprobe.stats import benjamini_hochberg

    rows = []
    for (design, layer), mine in arms.groupby(["design", "layer"], sort=False):
        wide = mine.pivot(index="item", columns="kind", values=[*OUTCOMES])
        for outcome in OUTCOMES:
            rows.append({"design": design, "layer": layer, "outcome": outcome} | _paired(wide[outcome], seed))
    table = pd.DataFrame(rows)
    table["p_bh"] = table.groupby(["design", "outcome"])["p"].transform(lambda p: benjamini_hochberg(p.to_numpy()))
    return table


def _paired(wide: pd.DataFrame, seed: int) -> dict[str, Any]:
    from kvprobe.stats import mean_interval, sign_flip

    row: dict[str, Any] = {}
    columns = {kind: wide[kind].to_numpy() for kind in KINDS} | {"difference": (wide["mask"] - wide["gate"]).to_numpy()}
    for name, values in columns.items():
        found = mean_interval(values, seed=seed)
        row |= {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
    test = sign_flip(columns["difference"], seed=seed)
    return row | {"p": test.p, "p_attainable": test.p_attainable, "n": test.n}


def agreement(arms: pd.DataFrame, forms: pd.DataFrame, seed: int) -> dict[str, Any]:
    """Rank correlation over layers of each one-layer KL with its closed form, within items: mean and interval."""
    from kvprobe.stats import mean_interval

    found = {}
    for kind, form in zip(KINDS, FORMS[:2], strict=True):
        mine = arms[(arms["design"] == "one") & (arms["kind"] == kind)]
        both = mine.merge(forms[["item", "layer", form]], on=["item", "layer"])
        rho = [one["kl"].rank().corr(one[form].rank()) for _, one in both.groupby("item")]
        interval = mean_interval([value for value in rho if math.isfinite(value)], seed=seed)
        found[kind] = {"mean": interval.mean, "ci_low": interval.low, "ci_high": interval.high, "n": interval.n}
    return found


def plot(df: pd.DataFrame) -> Figure:
    """Effect by layer of both, their difference below, and the closed forms of the clean run."""
    from needle_figures import mask_and_gate

    return mask_and_gate(df, DESIGNS, FORMS)


def report(df: pd.DataFrame) -> None:
    """Print the table for a person."""
    about = df.attrs["about"]
    print(f"{entered(about)}\n{about['semantics']}\nexploratory: no layer was named beforehand. [95 % over items]")
    for (design, outcome), rows in df.groupby(["design", "outcome"], sort=False):
        if outcome == "kl" and design != "all":
            continue  # it stands in the table
        print(f"\n{outcome}, on {DESIGNS.get(design, 'all layers')}")
        for row in rows.to_dict("records"):
            print(_line(row))
    for kind, found in about["agreement"].items():
        print(
            f"\n{kind}: rank correlation over layers of one-layer KL with its closed form, within items: "
            f"{found['mean']:.2f} {ends(found['ci_low'], found['ci_high'], '.2f')}, n {found['n']}"
        )


def _line(row: dict[str, Any]) -> str:
    changes = "  ".join(
        f"{name} {row[name]:+8.3f} {ends(row[f'{name}_low'], row[f'{name}_high'], '+.3f'):19s}"
        for name in (*KINDS, "difference")
    )
    forms = "" if math.isnan(row["refill"]) else "  L " + " ".join(f"{row[name]:6.2f}" for name in FORMS)
    return f"  {row['layer']:3d}  {changes}  p {row['p']:.4f} BH {row['p_bh']:.4f} (≥ {row['p_attainable']:.2g}){forms}"


def _options(parser: argparse.ArgumentParser) -> None:
    options(parser, ITEMS)
    parser.add_argument("--step", type=int, default=STEP, help="cumulative designs at every n-th layer (%(default)s)")
    parser.add_argument("--every", action="store_true", help="items that are not answered enter means, too")
    parser.add_argument("--norm", type=int, default=1, help="p of the closed forms (%(default)s)")


ANALYSIS = Analysis("mask_against_gate", (__doc__ or "").splitlines()[0], _options, plan, compute, plot, report)
main = ANALYSIS.main

if __name__ == "__main__":
    sys.exit(main())

"""How much of a raw change of attention after masking (sink, content) is arithmetic, by the mass that was masked?

    python analyses/renormalisation_artefact.py --out out/renormalisation

Masks take away mass, and what is left is rescaled to 1: every survivor gains, though nothing looked elsewhere. Spans of
every weight are masked on all layers for question and answer; the change of mass on the first four positions (sink) and
on the rest of the context (content) is split exactly, in two ways. Writes ``rows.parquet`` (a row a bucket × layers ×
bin of evicted mass), ``kinds.parquet`` (by kind of span), ``cells.parquet`` (a row an item × arm × bucket × layer ×
head), the figure and a manifest.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from common import Analysis, progress, words
from needle_items import Made, beside, ends, made, numbers, options, ran, subtitle

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor

    from kvprobe.tasks.items import Item

Span = tuple[int, int]

FIRST = 4
ITEMS = 10
EDGES = ("0.001", "0.01", "0.03", "0.1", "0.3")
WINDOWS = ("16", "64", "256")
BUCKETS = {"sink": "first 4 positions (sink)", "content": "rest of the context (content)"}
SPLITS = {"own": ("arithmetic", "mechanism"), "conditional": ("arithmetic_conditional", "shares")}
"""Split → its arithmetic part and the part that is an effect."""
NOISE = 1e-6
"""Changes smaller than this have no sign: fp32 rounding of attention rows."""

__all__ = ["ANALYSIS", "compute", "main", "plan", "plot"]


class Plan(NamedTuple):
    """Everything that is decided before a run: items, inner edges of the bins, arms of each item."""

    made: Made
    edges: tuple[float, ...]
    arms: tuple[dict[str, list[Span]], ...]


def plan(
    model: Any, edges: Sequence[str] = EDGES, windows: Sequence[str] = WINDOWS, draws: int = 2, **asked: Any
) -> Plan:
    """Check everything that is asked for.

    Parameters
    ----------
    edges
        Inner edges of the bins of evicted mass, between 0 and 1.
    windows, draws
        Lengths of windows masked anywhere in the context beside the needle, and how many of each, an item.
    **asked
        Which items: see :func:`needle_items.options`.
    """
    from kvprobe.errors import TaskError

    inner = numbers("edges", edges, float)
    if not inner or sorted({*inner}) != inner or not 0 < inner[0] <= inner[-1] < 1:
        raise TaskError(f"edges is {','.join(edges)!r}, must be rising numbers between 0 and 1")
    if draws < 1:
        raise TaskError(f"draws is {draws}, must be at least 1")
    items = made(model, asked, ITEMS)
    lengths = numbers("windows", windows, int)
    arms = tuple(_arms(item, lengths, draws) for item in items.items)
    return Plan(items, tuple(inner), arms)


def _arms(item: Item, lengths: Sequence[int], draws: int) -> dict[str, list[Span]]:
    """Name of an arm (its kind, and a number) → the spans that it masks."""
    import numpy as np

    first = item.prompt.pad
    found: dict[str, list[Span]] = {"evidence 0": [*item.spans["evidence"]], "first4 0": [(first, first + FIRST)]}
    found |= {f"hard {number}": [span] for number, span in enumerate(item.spans.get("hard", []))}
    rng = np.random.default_rng(item.seed)
    for length in lengths:
        starts = beside(item, FIRST, length)
        for number, at in enumerate(rng.choice(starts, min(draws, len(starts)), replace=False).tolist()):
            found[f"window{length} {number}"] = [(at, at + length)]
    return found


def compute(model: Any, asked: Plan) -> pd.DataFrame:
    """Splits of every arm, summed up by evicted mass.

    A cell is an item × arm × bucket × layer × head; its changes are those of the bucket's mass, mean over question and
    answer rows. Both splits (theory law 3) add up to ``raw`` = A′ − A, on unmasked keys:
    ``raw = arithmetic + mechanism`` (against the arm's own unmasked row A⁺; ``mechanism`` is the corrected change
    A′R − A) and ``raw = arithmetic_conditional + shares`` (``shares``: A′ − A/R, shares among survivors).

    Returns
    -------
    DataFrame
        ``bucket``, ``layers`` (``first``: the first masked layer, where mechanism and shares are 0; ``deeper``; or
        ``all``), ``bin`` (with ``low`` and ``high``; ``any`` for all bins), ``mass`` (mean a_S); ``raw``,
        ``mechanism``, ``shares``: mean over items with ``_low``, ``_high``, shares of attention;
        ``net_own``, ``net_conditional``: Σ arithmetic / Σ raw; ``gross_own``, ``gross_conditional``: Σ arithmetic /
        Σ (arithmetic + |effect|), sizes taken row by row; ``opposed``: share of cells whose raw change and change of
        shares have opposite signs; each with ``_low``, ``_high`` over items; ``n``, ``cells``. A ratio is NaN where a
        sum below it is not positive in every item. ``attrs["tables"]``: ``cells``, ``kinds``.
    """
    import pandas as pd

    parts, errors = [], []
    for index, (item, arms) in enumerate(progress("items")(list(zip(asked.made.items, asked.arms, strict=True)))):
        rows, error = item_cells(model, item, arms)
        parts.append(rows.assign(item=index))
        errors.append(error)
    cells = pd.concat(parts, ignore_index=True)
    table = summed(cells, asked.edges, asked.made.seed)
    about = asked.made.about(model) | {"identity_max_abs": max(errors), "first_mechanism_max": first_effect(cells)}
    table.attrs = {"tables": {"kinds": by_kind(cells, asked.made.seed), "cells": cells}, "about": about}
    return table


def item_cells(model: Any, item: Item, arms: dict[str, list[Span]]) -> tuple[pd.DataFrame, float]:
    """Cells of one item, and the largest |raw − its parts| over all keys, rows, heads and layers."""
    import pandas as pd

    from kvprobe.interventions import KVMask

    clean, *masked = ran(model, item, [(), *(KVMask(spans) for spans in arms.values())], keep_trace=True)
    parts, worst = [], 0.0
    for name, layer in itertools.product(range(len(masked)), range(clean.trace.n_layers)):
        (arm, spans), outcome = [*arms.items()][name], masked[name]
        values, error = layer_cells(outcome, clean, layer, _keys(item, spans))
        worst = max(worst, error)
        for bucket, columns in values.items():
            parts.append(pd.DataFrame(columns).assign(arm=arm, kind=arm.split()[0], bucket=bucket, layer=layer))
    rows = pd.concat(parts, ignore_index=True)
    return rows.assign(head=rows.groupby(["arm", "bucket", "layer"]).cumcount()), worst


def layer_cells(
    masked: Any, clean: Any, layer: int, keys: dict[str, Tensor]
) -> tuple[dict[str, dict[str, Any]], float]:
    """bucket → column → [heads]: changes of the bucket's mass, mean over rows; and the identities' largest error."""
    own, conditional = masked.attention_change(layer, clean)
    raw = masked.attention(layer) - clean.own_attention(layer)
    errors = (
        raw - own.arithmetic - own.mechanism - own.removal,
        raw - conditional.shares - conditional.arithmetic - conditional.removal,
    )
    split = {"raw": raw, "arithmetic": own.arithmetic, "mechanism": own.mechanism}
    split |= {"arithmetic_conditional": conditional.arithmetic, "shares": conditional.shares}
    mass = -own.removal.double().sum(-1).mean(-1)
    found = {}
    for bucket, at in keys.items():
        rows = {name: part[..., at].double().sum(-1) for name, part in split.items()}
        columns = {"mass": mass} | {name: row.mean(-1) for name, row in rows.items()}
        columns |= {f"{name}_size": rows[name].abs().mean(-1) for name in rows if name != "raw"}
        found[bucket] = {name: column.numpy() for name, column in columns.items()}
    return found, max(float(error.abs().max()) for error in errors)


def _keys(item: Item, spans: Sequence[Span]) -> dict[str, Tensor]:
    """Bucket → its keys; a bucket that is masked itself has no change to speak of."""
    import torch

    first = item.prompt.pad
    masked = {key for start, stop in spans for key in range(start, stop)}
    sink = [key for key in range(first, first + FIRST) if key not in masked]
    content = [key for key in range(first + FIRST, item.context_stop) if key not in masked]
    found = {"sink": sink, "content": content}
    return {name: torch.tensor(keys) for name, keys in found.items() if keys}


def first_effect(cells: pd.DataFrame) -> float:
    """Largest mechanism on the first masked layer, where A⁺ is the clean row: 0."""
    return float(cells.loc[cells["layer"] == cells["layer"].min(), "mechanism_size"].max())


def summed(cells: pd.DataFrame, edges: Sequence[float], seed: int) -> pd.DataFrame:
    """One row a bucket × layers × bin that holds cells."""
    import numpy as np
    import pandas as pd

    outer = [0.0, *edges, 1.0]
    place = np.digitize(cells["mass"], edges)
    first = cells["layer"] == cells["layer"].min()
    rows = []
    for bucket, (layers, chosen) in itertools.product(
        BUCKETS, {"first": first, "deeper": ~first, "all": first | ~first}.items()
    ):
        for number in [*range(len(outer) - 1), None]:
            mine = cells[(cells["bucket"] == bucket) & chosen & (True if number is None else place == number)]
            if len(mine):
                low, high = (0.0, 1.0) if number is None else outer[number : number + 2]
                name = "any" if number is None else f"{low:g}–{high:g}"
                where = {"bucket": bucket, "layers": layers, "bin": name, "low": low, "high": high}
                rows.append(where | described(mine, seed))
    return pd.DataFrame(rows)


def by_kind(cells: pd.DataFrame, seed: int) -> pd.DataFrame:
    """One row a bucket × kind of span, all layers: what a table of Δ-attention would say."""
    import pandas as pd

    keys = cells.groupby(["bucket", "kind"], sort=False)
    return pd.DataFrame([{"bucket": bucket, "kind": kind} | described(mine, seed) for (bucket, kind), mine in keys])


def described(mine: pd.DataFrame, seed: int) -> dict[str, Any]:
    """Means and ratios of some cells, each with its interval over items."""
    from kvprobe.stats import mean_interval

    opposed = (mine["raw"] * mine["shares"] < 0) & (mine[["raw", "shares"]].abs() > NOISE).all(axis=1)
    sized = mine.assign(one=1.0, opposed=opposed.astype(float))
    items = sized.groupby("item")
    means, sums = items.mean(numeric_only=True), items.sum(numeric_only=True)
    row: dict[str, Any] = {"mass": float(means["mass"].mean())}
    for name in CHANGES:
        found = mean_interval(means[name].to_numpy(), seed=seed)
        row |= {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
    for split, (arithmetic, effect) in SPLITS.items():
        row |= _ratio(f"net_{split}", sums[arithmetic], sums["raw"], seed)
        size = sums[f"{arithmetic}_size"]
        row |= _ratio(f"gross_{split}", size, size + sums[f"{effect}_size"], seed)
    row |= _ratio("opposed", sums["opposed"], sums["one"], seed)
    return row | {"n": len(means), "cells": len(mine)}


def _ratio(name: str, top: pd.Series, bottom: pd.Series, seed: int) -> dict[str, float]:
    """A ratio of sums; none where a bottom is not positive, since it would then be no share of anything."""
    from kvprobe.stats import ratio_interval

    if not (bottom > 0).all():
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"), float("nan"))
    found = ratio_interval(top.to_numpy(), bottom.to_numpy(), seed=seed)
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def plot(df: pd.DataFrame) -> Figure:
    """Change of mass by evicted mass, read three ways, and below it how much of the movement is arithmetic."""
    from needle_figures import renormalisation

    return renormalisation(df, BUCKETS)


def report(df: pd.DataFrame) -> None:
    """Print both tables for a person."""
    about, kinds = df.attrs["about"], df.attrs["tables"]["kinds"]
    print(f"{subtitle(about)}\n{about['semantics']}")
    print(
        f"raw = its parts within {about['identity_max_abs']:.2g}; effect on the first masked layer at most "
        f"{about['first_mechanism_max']:.2g}"
    )
    binned = df[df["layers"] == "deeper"]
    for title, columns, said in (("change of mass, percentage points", CHANGES, "+.3f"), ("per cent", RATIOS, ".1f")):
        for bucket, name in BUCKETS.items():
            print(f"\n{title}: {name}  [95 % over items]\n{'':29s}" + "".join(f"{column:29s}" for column in columns))
            for row in kinds[kinds["bucket"] == bucket].to_dict("records"):
                print(_line_of(f"{row['kind']}, all layers", row, columns, said))
            for row in binned[binned["bucket"] == bucket].to_dict("records"):
                print(_line_of(f"a_S {row['bin']}, deeper", row, columns, said))
    print(f"\n{READ}")


CHANGES = ("raw", "mechanism", "shares")
RATIOS = ("net_own", "net_conditional", "gross_own", "gross_conditional", "opposed")
READ = (
    "raw: A′ − A; mechanism: the corrected change A′R − A; shares: A′ − A/R among survivors. net: Σ arithmetic / Σ raw "
    "(nan where raw does not rise in every item); gross: Σ arithmetic / Σ (arithmetic + |effect|); opposed: cells "
    "where raw and shares have opposite signs."
)


def _line_of(name: str, row: dict[str, Any], columns: Any, form: str) -> str:
    cells = (
        f"{100 * row[column]:{form}} {ends(100 * row[f'{column}_low'], 100 * row[f'{column}_high'], form)}"
        for column in columns
    )
    return f"  {name:26s} " + "".join(f"{cell:29s}" for cell in cells) + f"n {row['n']}, {row['cells']} cells"


def _options(parser: argparse.ArgumentParser) -> None:
    options(parser, ITEMS)
    parser.add_argument("--edges", type=words, default=EDGES, help=f"of the bins of evicted mass ({','.join(EDGES)})")
    parser.add_argument("--windows", type=words, default=WINDOWS, help=f"lengths of windows ({','.join(WINDOWS)})")
    parser.add_argument("--draws", type=int, default=2, help="windows of each length an item (%(default)s)")


ANALYSIS = Analysis("renormalisation_artefact", (__doc__ or "").splitlines()[0], _options, plan, compute, plot, report)
main = ANALYSIS.main

if __name__ == "__main__":
    sys.exit(main())

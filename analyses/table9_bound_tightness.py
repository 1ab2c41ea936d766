"""How far do the bounds lie above the actual perturbation, and what does the centred bound buy?

    python analyses/table9_bound_tightness.py --out out/table9

Writes ``rows.parquet`` (a row a preset × base × cache × level), ``layers.parquet`` (layer by layer), the figure and a
manifest.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from common import Analysis, document_options, progress

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvprobe.audits import Settings

USUAL: dict[str, Any] = {"bases": "snapkv,adakv", "presets": "paper,released", "caches": "0.1,0.2,0.4"}
USUAL |= {"levels": "layer,head", "alpha": None, "epsilon": None, "norm": 1, "seed": 0}

__all__ = ["ANALYSIS", "compute", "main", "plan", "plot"]


def plan(model: Any, **asked: Any) -> Settings:
    """Check everything that is asked for.

    Parameters
    ----------
    **asked
        ``bases``, ``presets``, ``caches``, ``levels`` (comma-separated words), ``alpha``, ``epsilon``, ``norm``,
        ``seed``, and what :func:`common.document_options` gives.
    """
    return settings(model, USUAL | asked)


def settings(model: Any, asked: dict[str, Any]) -> Settings:
    """An audit's settings from options, checked."""
    from kvprobe.audits import validate
    from kvprobe.audits.settings import from_command

    given = dict(asked)
    plain = {"docs": None, "documents": None, "length": None, "join": 1, "template": None, "chat": False}
    plain |= {"probe": "first_decoded", "sweep": "", "task": "niah_single_1", "items": 0, "setting": "context"}
    plain |= {"sweep_cache": "0.1,0.2"}
    named = {name.removesuffix("s"): given.pop(name) for name in ("bases", "presets", "caches", "levels")}
    found = from_command(plain | named | given)
    validate(model, found)
    return found


def compute(model: Any, asked: Settings) -> pd.DataFrame:
    """Table 9 as :meth:`kvprobe.audits.Result.rows` has it; ``attrs["tables"]["layers"]``: layer by layer."""
    from kvprobe import audits

    result = audits.run(model, asked, progress("documents"))
    table = result.rows()
    table.attrs = {"tables": {"layers": result.layer_rows()}, "about": about(model, result)}
    return table


def about(model: Any, result: Any) -> dict[str, Any]:
    """What the run's summary says of the run, not of its results."""
    tables = ("rows", "sweeps", "scores", "published")
    return {"model": model.name} | {name: value for name, value in result.summary.items() if name not in tables}


def plot(df: pd.DataFrame) -> Figure:
    """The bounds beside the actual perturbation."""
    from common import plain

    from kvprobe.plots import bounds_and_actual

    return bounds_and_actual(plain(df), df.attrs["about"])


def report(df: pd.DataFrame) -> None:
    """Print the table for a person, the paper's rows beside it."""
    from kvprobe import published

    print(heading(df.attrs["about"]))
    fact = published.BOUNDS
    theirs = {row["cache"]: row for row in fact["rows"]}
    for level, rows in df.groupby("level", sort=False):
        kind = "a layer: L of the summed change, bounds summed over heads" if level == "layer" else "a head"
        print(f"\nAverages over {kind}. Right of the bar: only heads with σ > ½, other averages than on its left")
        print(f"{'':35s}{'L':>8s}{'θ_c':>8s}{'θ':>8s}  θ_c/L [95 %]        θ/L [95 %]         |{RIGHT}")
        for row in rows.to_dict("records"):
            print(_line(row))
            if level == "layer" and row["cache"] in theirs:
                print(_theirs(theirs[row["cache"]]))
    print(f"\npaper: {published.in_words(fact)}: another model, other documents; the paper does not say whether its")
    print("bound is θ or θ̂, nor of which heads. It stands beside the rows by layer, as averages within a layer.")
    said = "L ≤ θ_c ≤ θ ≤ θ̂ ≤ relaxed bound, each of the same set"
    print(f"{said}: {df['violations'].sum()} violations in {df['n_cells'].sum()} cells")


RIGHT = f"{'σ > ½':>9s}{'θ':>8s}{'θ̂':>9s}{'previous':>10s}{'θ̂/prev.':>10s}{'θ/prev.':>9s}"


def heading(about: dict[str, Any]) -> str:
    """Which documents, how long, and what happens when."""
    tokens, kept = about["tokens"], about["compressed_tokens"]
    return (
        f"{about['model']}, {about['n_docs']} documents ({about['docs']}) of {tokens['min']}–{tokens['max']} tokens, "
        f"{kept['min']}–{kept['max']} of them compressed, {about['truncated']} cut, L{about['norm']} norm.\n"
        f"{about['semantics']}"
    )


def _line(row: dict[str, Any]) -> str:
    name = f"{row['base']:14s}{row['preset']:11s}{100 * row['cache']:5.3g} %"
    left = "".join(f"{row[column]:8.4g}" for column in ("actual", "centred_bound", "bound"))
    ratios = "".join(f"  {_ratio(row, name):18s}" for name in ("centred", "bound"))
    right = f"{100 * row['share_selected']:7.1f} %" + f"{row['bound_same_heads']:8.4g}{row['stage2_bound']:8.4g}"
    right += f"{row['previous_bound']:10.4g}{100 * row['ratio']:7.1f} %{100 * row['ratio_bound']:7.1f} %"
    return f"{name:35s}{left}{ratios}|{right}"


def _ratio(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_over_actual_low"], row[f"{name}_over_actual_high"]
    return f"{row[f'{name}_over_actual']:.2f} " + ("[none]" if low != low else f"[{low:.2f}, {high:.2f}]")


def _theirs(row: dict[str, float]) -> str:
    over = row["bound"] / row["actual"]
    name = f"   paper, Llama-3.1-8B{100 * row['cache']:8.3g} %"
    left = f"{name:35s}{row['actual']:8.4g}{'':8s}{row['bound']:8.4g}{'':20s}  {over:<18.2f}|"
    return left + f"{'':26s}{row['previous_bound']:10.4g}{100 * row['ratio']:7.1f} %"


def options(parser: argparse.ArgumentParser) -> None:
    """Documents, policies, sizes."""
    document_options(parser)
    for name in ("bases", "presets", "caches"):
        parser.add_argument(f"--{name}", default=USUAL[name], help="comma-separated (%(default)s)")
    parser.add_argument("--alpha", type=float, help="share of the first stage (0.5)")
    parser.add_argument("--epsilon", type=float, help="of the second stage (1e-4)")
    parser.add_argument("--norm", type=int, default=1, help="p of L and of the bounds (%(default)s)")


ANALYSIS = Analysis("table9_bound_tightness", (__doc__ or "").splitlines()[0], options, plan, compute, plot, report)
main = ANALYSIS.main

if __name__ == "__main__":
    sys.exit(main())

"""Does the first stage of Algorithm 1 hold more than half of the attention (Assumption 3.4), and where does it not?

    python analyses/fig8_assumption.py --out out/fig8

Writes ``rows.parquet`` (a row a preset × base × cache × head), ``shares.parquet`` (the share of heads with σ > ½ and
its interval), the figure and a manifest.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from common import Analysis, progress
from table9_bound_tightness import USUAL, about, heading, options, settings

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvprobe.audits import Settings

CACHES = "0.1,0.2"
READINGS = {"selected": "sigma", "oracle": "sigma_oracle"}
SAID = {"selected": "set selected by the policy", "oracle": "best set of that size"}

__all__ = ["ANALYSIS", "compute", "main", "plan", "plot"]


def plan(model: Any, **asked: Any) -> Settings:
    """Check everything that is asked for: options as of ``table9_bound_tightness``."""
    return settings(model, USUAL | {"caches": CACHES} | asked | {"levels": "head"})


def compute(model: Any, asked: Settings) -> pd.DataFrame:
    """σ of every head, mean over documents, in both readings.

    Returns
    -------
    DataFrame
        ``preset``, ``base``, ``cache``, ``layer``, ``head``; ``sigma``, ``sigma_oracle``: mean mass of the first stage
        that was selected, and of the best set of that size; ``fails``, ``fails_oracle``: share of the documents where
        it is ½ or less; ``stage1``: entries of the first stage, mean; ``n_docs``. ``attrs["tables"]["shares"]``: one
        row a preset × base × cache, see :func:`kvprobe.audits.assumption`.
    """
    import pandas as pd

    from kvprobe import audits

    result = audits.run(model, asked, progress("documents"))
    table = pd.concat([heads(result.heads, pair) for pair in asked.pairs], ignore_index=True)
    rows = result.rows()
    names = [name for name in rows if name.startswith(("share_", "heads_"))]
    shares = rows[["preset", "base", "cache", *names, "n_docs"]]
    table.attrs = {"tables": {"shares": shares}, "about": about(model, result)}
    return table


def heads(cells: pd.DataFrame, pair: Any) -> pd.DataFrame:
    """One row a cache × head of a pair's Algorithm 1."""
    mine = cells[cells["policy"] == pair.policies[1].name]
    fails = {f"fails{name}": (mine[f"sigma{name}"] <= 0.5).astype(float) for name in ("", "_oracle")}
    columns = ["sigma", "sigma_oracle", *fails, "stage1"]
    grouped = mine.assign(**fails).groupby(["cache", "layer", "head"])
    table = grouped[columns].mean().assign(n_docs=grouped["doc"].nunique()).reset_index()
    table.insert(0, "preset", pair.preset)
    table.insert(1, "base", pair.base.name)
    return table


def plot(df: pd.DataFrame) -> Figure:
    """Layer × head maps of σ."""
    from common import plain

    from kvprobe.plots import assumption_map

    return assumption_map(plain(df), df.attrs["tables"]["shares"], df.attrs["about"])


def report(df: pd.DataFrame) -> None:
    """Print shares and failing heads for a person, the paper's shares beside them."""
    from kvprobe import published

    print(heading(df.attrs["about"]))
    shares = df.attrs["tables"]["shares"].set_index(["base", "preset", "cache"])
    for key, mine in df.groupby(["base", "preset", "cache"], sort=False):
        base, preset, cache = key
        print(f"\n{base}, {preset}, cache {100 * cache:.3g} %: {mine['stage1'].mean():.4g} entries in the first stage")
        for reading, column in READINGS.items():
            row, failing = shares.loc[key], mine[mine[column] <= 0.5]
            ends = _ends(row[f"share_{reading}_low"], row[f"share_{reading}_high"])
            print(f"  {SAID[reading]}: σ > ½ in {100 * row[f'share_{reading}']:.1f} % {ends} of heads × documents")
            print(f"    mean σ ≤ ½: {len(failing)} of {len(mine)} heads{_listed(failing)}")
    print("\npaper, share of heads by the best set of that size:")
    for row in published.ASSUMPTION["rows"]:
        print(f"  {row['model']}, cache {100 * row['cache']:.3g} %: {100 * row['share']:.2f} %")
    print(f"  {published.in_words(published.ASSUMPTION)}: other models, other documents")


def _ends(low: float, high: float) -> str:
    return "[no interval]" if low != low else f"[{100 * low:.1f}, {100 * high:.1f}]"


def _listed(failing: pd.DataFrame) -> str:
    """``: layer 0: 1 2; layer 3: 7``."""
    layers = [f"layer {layer}: {' '.join(map(str, mine['head']))}" for layer, mine in failing.groupby("layer")]
    return ": " + "; ".join(layers) if layers else ""


def _options(parser: argparse.ArgumentParser) -> None:
    options(parser)
    parser.set_defaults(caches=CACHES)


ANALYSIS = Analysis("fig8_assumption", (__doc__ or "").splitlines()[0], _options, plan, compute, plot, report)
main = ANALYSIS.main

if __name__ == "__main__":
    sys.exit(main())

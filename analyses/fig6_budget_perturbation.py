"""At which cache sizes does a second stage (CriticalKV) perturb the heads less, on average and head by head?

    python analyses/fig6_budget_perturbation.py --out out/fig6

Two texts make one document unless told otherwise (``--join``): 2.5 % of one shipped essay are fewer entries than the
window that SnapKV always keeps; of two essays they are about 36, of which the window still takes 32. Writes
``rows.parquet`` (one row a preset × size, as drawn), ``cells.parquet`` (every document and head), the figure and a
manifest.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import common
import fig4_head_perturbation as shared

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvprobe.maps import Settings

CACHES = ("0.025", "0.05", "0.1", "0.2", "0.4")
JOIN = 2
PAPER = (
    "The paper (CriticalKV, arXiv 2502.03805, Figure 6) reports a lower perturbation at every size from 2.5 % to 40 % "
    "of the cache, of models of 7B parameters and more. A small model need not replicate it."
)


def plan(model: Any, **asked: Any) -> Settings:
    """Settings of the maps at all sizes, checked against the model and the documents."""
    return shared.settings(model, **{"caches": CACHES, "join": JOIN, "measure": "local"} | asked)


def compute(model: Any, planned: Settings) -> pd.DataFrame:
    """Mean perturbation over heads at every size, and the share of heads that it falls in, with intervals.

    Returns
    -------
    DataFrame
        One row a preset × size: :func:`kvprobe.maps.budget_rows`. ``attrs["tables"]``: ``cells``, each document and
        head by itself (:func:`kvprobe.maps.per_head`).
    """
    result = shared.mapped(model, planned)
    return shared.described(model, result, result.budget_rows(), cells=result.heads)


def plot(df: pd.DataFrame) -> Figure:
    """Mean perturbation, its reduction, and the share of heads reduced, one row a preset."""
    from kvprobe import plots

    return plots.perturbation_budgets(common.plain(df), df.attrs["summary"])


def report(df: pd.DataFrame) -> None:
    """Print every size for a person."""
    from kvprobe.commands.console import per_cent
    from kvprobe.plots.maps import window_note

    print(shared.headed(df))
    columns = f"{'base − ours [95 %]':>30s}{'heads reduced [95 %]':>26s}"
    print(f"{'preset':12s}{'cache':>8s}{'base':>10s}{'ours':>10s}{columns}")
    for row in df.itertuples():
        reduction = f"{row.reduction:+.3g} {shared.between(row.ci_low, row.ci_high)}"
        heads = f"{per_cent(row.heads_reduced)} {shared.between(100 * row.heads_low, 100 * row.heads_high)}"
        means = f"{row.base:10.4g}{row.ours:10.4g}"
        print(f"{row.preset:12s}{per_cent(row.cache):>8s}{means}{reduction:>30s}{heads:>26s}")
    if crowded := window_note(df.attrs["summary"], sorted(set(df["cache"]))):
        print(crowded)
    print(PAPER)


def options(parser: argparse.ArgumentParser) -> None:
    """Policies, their presets, and all sizes."""
    shared.policies(parser)
    sizes = f"shares of the cache to keep, comma-separated ({','.join(CACHES)})"
    parser.add_argument("--caches", type=common.words, default=CACHES, help=sizes)
    common.document_options(parser, JOIN)


ANALYSIS = common.Analysis(
    name="fig6_budget_perturbation",
    question=(__doc__ or "").splitlines()[0],
    options=options,
    plan=plan,
    compute=compute,
    plot=plot,
    report=report,
)
main = ANALYSIS.main

if __name__ == "__main__":
    sys.exit(main())

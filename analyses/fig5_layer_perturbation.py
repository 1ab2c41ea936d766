"""Which layers does a second stage (CriticalKV) perturb less, at the first decoded token of a compressed document?

    python analyses/fig5_layer_perturbation.py --out out/fig5

Writes ``rows.parquet`` (one row a preset × layer, as drawn), ``runs.parquet`` (every document and every measure), the
figure and a manifest.
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

PAPER = (
    "The paper (CriticalKV, arXiv 2502.03805, Figure 5) reports a reduction that grows with depth and jumps at the "
    "last layers, about 37 at layer 31 of Llama-3.1-8B-Instruct. A small model need not replicate it."
)


def compute(model: Any, planned: Settings) -> pd.DataFrame:
    """Mean perturbation of every layer under both policies, and its reduction with an interval over documents.

    Returns
    -------
    DataFrame
        One row a preset × layer, of the settings' measure: :func:`kvprobe.maps.layer_rows`. ``attrs["tables"]``:
        ``runs``, each document by itself and by all three measures (:func:`kvprobe.maps.per_layer`).
    """
    result = shared.mapped(model, planned)
    return shared.described(model, result, result.layer_rows(), runs=result.layers)


def plot(df: pd.DataFrame) -> Figure:
    """Perturbation, its reduction, and the reduction by size, one column a preset."""
    from kvprobe import plots

    return plots.perturbation_layers(common.plain(df), df.attrs["summary"])


def report(df: pd.DataFrame) -> None:
    """Print every layer for a person."""
    from kvprobe.maps import MEASURES

    print(shared.headed(df))
    print(f"perturbation of {MEASURES[df.attrs['summary']['measure']]}")
    print(f"{'preset':12s}{'layer':>6s}{'base':>12s}{'ours':>12s}{'base − ours [95 %]':>32s}")
    for row in df.itertuples():
        reduction = f"{row.reduction:+.3g} {shared.between(row.ci_low, row.ci_high)}"
        print(f"{row.preset:12s}{row.layer:6d}{row.base:12.4g}{row.ours:12.4g}{reduction:>32s}")
    print(PAPER)


def options(parser: argparse.ArgumentParser) -> None:
    """Policies, their presets, one size, and what a layer's perturbation is of."""
    shared.options(parser)
    measure = "attn_out, hidden (all layers evict), or local (each layer alone) (%(default)s)"
    parser.add_argument("--measure", default="attn_out", help=measure)


ANALYSIS = common.Analysis(
    name="fig5_layer_perturbation",
    question=(__doc__ or "").splitlines()[0],
    options=options,
    plan=shared.settings,
    compute=compute,
    plot=plot,
    report=report,
)
main = ANALYSIS.main

if __name__ == "__main__":
    sys.exit(main())

"""Does it matter whether the second stage weighs values by their L1 or by their L2 norm?

    python analyses/fig9_distance.py --out out/fig9

L is measured in both norms, whichever one selects. Writes ``rows.parquet`` (a row a preset × cache × norm of the
selector × norm of L), ``direct.parquet`` (L2 selection against L1 selection, document by document), ``scores.parquet``,
the figure and a manifest.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from common import Analysis
from sweeping import Plan, options, plot, report, table
from sweeping import plan as planned

if TYPE_CHECKING:
    import pandas as pd

    from kvprobe.audits import Sweep

BASE = "adakv"
NORMS = (1, 2)
PAPER = (
    "The paper (CriticalKV, arXiv 2502.03805v2, Figure 9) finds no significant difference between the two norms, in "
    "RULER scores at 4K tokens of models of 7B parameters and more."
)

__all__ = ["ANALYSIS", "compute", "main", "plan", "plot"]


def plan(model: Any, alpha: float | None = None, **asked: Any) -> Plan:
    """Check everything that is asked for.

    Parameters
    ----------
    alpha
        First-stage share; None: the policy's own.
    **asked
        As in :class:`sweeping.Plan`; ``base``, ``presets``, and what :func:`common.document_options` gives.
    """
    given = {} if alpha is None else {"alpha": alpha}
    return planned(model, "norm", NORMS, {"measured": NORMS, **asked}, BASE, **given)


def compute(model: Any, asked: Plan) -> pd.DataFrame:
    """Perturbation, in both norms, and scores under both selections: see :func:`sweeping.table`.

    ``attrs["tables"]["direct"]``: ``change`` is L under L2 selection minus L under L1 selection.
    """
    return table(model, asked, against)


def against(sweep: Sweep) -> Sweep:
    """The same policy with p = 2 against p = 1: both are policies of the sweep itself, under the same names."""
    from kvprobe.audits import Sweep
    from kvprobe.cells import Pair

    return Sweep("norm", Pair(sweep.policies[0], sweep.pair.ours, sweep.pair.preset), NORMS[1:])


def _options(parser: argparse.ArgumentParser) -> None:
    options(parser, BASE)
    parser.add_argument("--alpha", type=float, help="share of the first stage (0.5)")


def _report(df: pd.DataFrame) -> None:
    report(df, PAPER)
    print("\nL2 selection against L1 selection, the same documents: L − L, mean over heads")
    for row in df.attrs["tables"]["direct"].to_dict("records"):
        ends = "[no interval]" if row["ci_low"] != row["ci_low"] else f"[{row['ci_low']:+.3g}, {row['ci_high']:+.3g}]"
        share, lower = 100 * row["change"] / row["base_L"], 100 * row["heads_reduced"]
        print(
            f"{row['preset']:10s} cache {100 * row['cache']:.3g} %, L in L{row['measured']}: {row['change']:+.3g} "
            f"{ends}, {share:+.2f} % of L; {lower:.0f} % of heads lower under L2"
        )


ANALYSIS = Analysis("fig9_distance", (__doc__ or "").splitlines()[0], _options, plan, compute, plot, _report)
main = ANALYSIS.main

if __name__ == "__main__":
    sys.exit(main())

"""How much does the first stage's share α of Algorithm 1 matter, for the perturbation and for a task?

    python analyses/table8_alpha.py --out out/table8

Writes ``rows.parquet`` (a row a preset × cache × α), ``scores.parquet``, the figure and a manifest.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from common import Analysis, words
from sweeping import Plan, options, plot, report, table
from sweeping import plan as planned

if TYPE_CHECKING:
    import pandas as pd

BASE = "adakv"
ALPHAS = ("0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1")
PAPER = (
    "The paper (CriticalKV, arXiv 2502.03805v2, Tables 7 and 8) reports LongBench scores of models of 7B parameters "
    "and more, one of them insensitive to α and one that loses much at α = 0: nothing to hold beside these numbers."
)

__all__ = ["ANALYSIS", "compute", "main", "plan", "plot"]


def plan(
    model: Any, alphas: tuple[str, ...] = ALPHAS, epsilon: float | None = None, norm: int = 1, **asked: Any
) -> Plan:
    """Check everything that is asked for.

    Parameters
    ----------
    alphas
        First-stage shares, as written.
    epsilon
        Of the second stage; None: the policy's own.
    norm
        p of L and of the selector's value norm.
    **asked
        As in :class:`sweeping.Plan`; ``base``, ``presets``, and what :func:`common.document_options` gives.
    """
    given = {} if epsilon is None else {"epsilon": epsilon}
    return planned(model, "alpha", numbers("alphas", alphas), {"measured": (norm,), **asked}, BASE, p=norm, **given)


def numbers(name: str, texts: tuple[str, ...]) -> list[float]:
    """The numbers that words stand for."""
    from kvprobe.errors import EvictionError, quote

    try:
        return [float(text) for text in texts]
    except ValueError:
        raise EvictionError(f"{name}={quote(','.join(texts))}; allowed: numbers, comma-separated") from None


def compute(model: Any, asked: Plan) -> pd.DataFrame:
    """Perturbation and scores under every α: see :func:`sweeping.table`."""
    return table(model, asked)


def _options(parser: argparse.ArgumentParser) -> None:
    options(parser, BASE)
    parser.add_argument("--alphas", type=words, default=ALPHAS, help=f"comma-separated ({','.join(ALPHAS)})")
    parser.add_argument("--epsilon", type=float, help="of the second stage (1e-4)")
    parser.add_argument("--norm", type=int, default=1, help="p of L and of the value norm (%(default)s)")


def _report(df: pd.DataFrame) -> None:
    report(df, PAPER)


ANALYSIS = Analysis("table8_alpha", (__doc__ or "").splitlines()[0], _options, plan, compute, plot, _report)
main = ANALYSIS.main

if __name__ == "__main__":
    sys.exit(main())

"""Which heads does a second stage (CriticalKV) perturb less, at the first decoded token of a compressed document?

    python analyses/fig4_head_perturbation.py --out out/fig4

Writes ``rows.parquet`` (one row a preset × layer × head, as drawn), ``shares.parquet`` (shares of heads with their
intervals), ``cells.parquet`` (every document), the figure and a manifest.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvprobe.maps import Result, Settings

PRESETS = ("paper", "released")


def plan(model: Any, **asked: Any) -> Settings:
    """Settings of the maps, checked against the model and the documents."""
    return settings(model, **{"measure": "local"} | asked)  # no run is needed for closed forms


def compute(model: Any, planned: Settings) -> pd.DataFrame:
    """Mean perturbation of every head under both policies, over documents.

    Returns
    -------
    DataFrame
        One row a preset × layer × head: :func:`kvprobe.maps.head_rows`. ``attrs["tables"]``: ``cells``, each document
        by itself (:func:`kvprobe.maps.per_head`), and ``shares``, one row a preset × measure: share of heads whose mean
        is lower, with its 95 % interval over documents.
    """
    result = mapped(model, planned)
    return described(model, result, result.head_rows(), cells=result.heads, shares=shares(result.summary))


def shares(summary: dict[str, Any]) -> pd.DataFrame:
    """Share of heads with a lower perturbation ``L``, ``bound``, ``centred`` bound and evicted ``mass``."""
    import pandas as pd

    blocks = ((preset, block["by_measure"]) for preset, block in summary["presets"].items())
    rows = [{"preset": preset, "measure": name} | found for preset, block in blocks for name, found in block.items()]
    return pd.DataFrame(rows)


def plot(df: pd.DataFrame) -> Figure:
    """Layer × head map of the log ratio and its distribution, one row a preset."""
    from kvprobe import plots

    return plots.perturbation_heads(common.plain(df), df.attrs["summary"])


def report(df: pd.DataFrame) -> None:
    """Print the shares of heads for a person."""
    from kvprobe import published
    from kvprobe.commands.console import per_cent

    print(headed(df))
    print(f"{'preset':12s}{'heads reduced [95 %]':>28s}{'significantly lower':>22s}{'higher':>8s}{'median log2':>14s}")
    for preset, mine in common.plain(df).groupby("preset", sort=False):
        found = df.attrs["summary"]["presets"][preset]["heads_reduced"]
        share = f"{per_cent(found['share'])} {between(100 * found['ci_low'], 100 * found['ci_high'])}"
        counts = f"{found['significantly_lower']:22d}{found['significantly_higher']:8d}"
        print(f"{preset:12s}{share:>28s}{counts}{mine['log2_ratio'].median():14.3f}")
        if found["cannot_reject"]:
            print(f"{'':12s}no head could be significant: p is at least {found['p_attainable']:.3g}")
    reported = published.HEADS_REDUCED
    said = ", ".join(f"{per_cent(share)} ({model})" for model, share in reported["share"].items())
    print(f"The paper reports {said}: {published.in_words(reported)}. A small model need not replicate it.")


def options(parser: argparse.ArgumentParser) -> None:
    """Policies, their presets, and one size."""
    policies(parser)
    parser.add_argument("--cache", default="0.2", help="share of the cache to keep (%(default)s)")
    common.document_options(parser)


def policies(parser: argparse.ArgumentParser) -> None:
    """What is compared, and the norm."""
    parser.add_argument("--policy", default="snapkv", help="base policy (%(default)s)")
    parser.add_argument("--against", default="snapkv+two_stage", help="policy held against it (%(default)s)")
    presets = f"comma-separated ({','.join(PRESETS)})"
    parser.add_argument("--presets", type=common.words, default=PRESETS, help=presets)
    parser.add_argument("--norm", type=int, default=1, help="p of the perturbation, 1 or 2 (%(default)s)")


def settings(model: Any, join: int = 1, caches: tuple[str, ...] | None = None, **asked: Any) -> Settings:
    """What is to be mapped, checked: at the size ``cache`` alone, or at ``caches``, whose first one is the main one."""
    from kvprobe import maps

    reading = common.reading(asked | {"join": join})
    given = {"policy": "snapkv", "against": "snapkv+two_stage", "presets": PRESETS} | asked
    cache = given.pop("cache", "0.2").strip()
    pairs = maps.pairs_of(given.pop("policy"), given.pop("against"), given.pop("presets"))
    known = {name: value for name, value in given.items() if name not in common.DOCUMENTS}
    main, budgets = (cache, (cache,)) if caches is None else ((*caches, cache)[0], caches)
    planned = maps.Settings(pairs, main, budgets, reading, **known)
    maps.validate(model, planned)
    return planned


def mapped(model: Any, planned: Settings) -> Result:
    """Run the maps, with a bar on a terminal."""
    from kvprobe import maps

    return maps.run(model, planned, common.progress("documents"))


def described(model: Any, result: Result, rows: pd.DataFrame, **tables: pd.DataFrame) -> pd.DataFrame:
    """The drawn table, with what else is stored and what the figure says of its run."""
    summary = {"model": model.name} | result.summary
    facts = ("n_docs", "tokens", "compressed_tokens", "truncated", "cache", "caches", "measure", "norm", "policies")
    rows.attrs = {
        "tables": tables,
        "summary": summary,
        "about": {"semantics": summary["semantics"], "settings": {name: summary[name] for name in facts}},
    }
    return rows


def headed(df: pd.DataFrame) -> str:
    """What a printed table is of: policies, model, documents, and what happens when."""
    from kvprobe.commands.console import documents_line

    about = df.attrs["summary"]
    return (
        f"{about['against']} against {about['policy']} on {about['model']}: {documents_line(about)}, "
        f"L{about['norm']}\n{about['semantics']}"
    )


def between(low: float, high: float) -> str:
    """``[low, high]``."""
    from kvprobe.commands.console import interval

    return interval({"ci_low": low, "ci_high": high})


ANALYSIS = common.Analysis(
    name="fig4_head_perturbation",
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

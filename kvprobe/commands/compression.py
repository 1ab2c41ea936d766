"""``kvprobe evict``: task score against cache budget."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe import records
from kvprobe.commands.console import console, interval, written
from kvprobe.commands.running import Experiment

if TYPE_CHECKING:
    from kvprobe.curves import Result, Settings


def evict(name: str, settings: Settings, out: Path | None, arguments: dict[str, Any]) -> tuple[dict[str, Any], Result]:
    """Answer a task from every compressed cache; with ``out``, write tables, the figure and a manifest there."""
    from kvprobe import curves

    def described(summary: dict[str, Any]) -> dict[str, Any]:
        return asdict(settings) | {"policies": summary["policies"]}

    return Experiment("evict", curves, settings, described, _write).perform(name, out, arguments)


def _write(run: records.Run, result: Result, summary: dict[str, Any]) -> None:
    from kvprobe import plots

    for name, table in {"answers": result.answers(), "rows": result.rows(), "pairs": result.pairs()}.items():
        run.table(table, f"{name}.parquet")
    run.figure(plots.score_against_cache(result.rows(), summary), "score_against_cache.png")


def print_evict(summary: dict[str, Any], out: Path | None) -> None:
    """The summary as tables for a person."""
    full, screen = summary["full"], console()
    screen.print(
        f"{summary['task']} on {summary['model']}: {_items(summary)}, length {summary['length']}, "
        f"seed {summary['seed']}, setting {summary['setting']}"
    )
    screen.print(summary["semantics"])
    screen.print(f"score with the full cache: {full['score']:.2f} {interval(full)}")
    for table in _score_tables(summary, screen.width):
        screen.print(table)
    if summary["pairs"]:
        screen.print(_pair_table(summary))
    for row in summary["rows"]:
        if "notes" in row:
            facts = ", ".join(f"{key.replace('_', ' ')} {_fact(value)}" for key, value in row["notes"].items())
            screen.print(f"{row['policy']} at {_per_cent(row['cache'])}: {facts}")
    screen.print(f"{summary['timings_s']['total_s']:.0f} s, peak memory {summary['peak_rss_mib']:.0f} MiB")
    if out is not None:
        screen.print(written(out))


def _items(summary: dict[str, Any]) -> str:
    n = summary["n_items"]
    return f"{n} item" if n == 1 else f"{n} items"


def _per_cent(cache: float) -> str:
    return f"{100 * cache:.6g} %"


def _fact(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


CELL = 12
"""Columns of the terminal that one size takes: ``0.12–0.98`` and its frame."""


def _score_tables(summary: dict[str, Any], width: int) -> list[Any]:
    """Scores with the interval below each; as many sizes a table as the terminal holds."""
    caches = sorted({row["cache"] for row in summary["rows"]})
    longest = max(len(row["policy"]) for row in summary["rows"])
    at_once = max(1, (width - longest - 4) // CELL)
    tables = [_score_table(summary, caches[at : at + at_once]) for at in range(0, len(caches), at_once)]
    tables[0].title = f"Score by share of the cache, its 95 % interval over {_items(summary)} below"
    return tables


def _score_table(summary: dict[str, Any], caches: list[float]) -> Any:
    from rich.table import Table

    table = Table(title_justify="left", show_lines=True)
    table.add_column("policy", no_wrap=True)
    for cache in caches:
        table.add_column(_per_cent(cache), justify="right", no_wrap=True)
    for policy in dict.fromkeys(row["policy"] for row in summary["rows"]):
        cells = {row["cache"]: row for row in summary["rows"] if row["policy"] == policy}
        table.add_row(policy, *(f"{cells[cache]['score']:.2f}\n{_below(cells[cache])}" for cache in caches))
    return table


def _below(row: dict[str, Any]) -> str:
    low, high = row["ci_low"], row["ci_high"]
    return "–" if low is None or low != low else f"{low:.2f}–{high:.2f}"


LEVEL = 0.05
PAIR_NOTE = "p: sign flip over items, not corrected for the number of rows; †: none of 0.05 or less is attainable"


def _pair_table(summary: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(
        title="What the second stage changes, within items: score, and ln p of the gold answer (nats)",
        caption=PAIR_NOTE,
        title_justify="left",
        caption_justify="left",
    )
    for column in ("policy", "cache", "score", "p", "log-probability", "p"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    rows = {(row["policy"], row["cache"], row["measure"]): row for row in summary["pairs"]}
    for policy, cache in dict.fromkeys((row["policy"], row["cache"]) for row in summary["pairs"]):
        cells = []
        for measure in ("score", "logprob"):
            row = rows[policy, cache, measure]
            cells += [f"{row['difference']:+.2f} {interval(row)}", _p(row)]
        table.add_row(policy, _per_cent(cache), *cells)
    return table


def _p(row: dict[str, Any]) -> str:
    """p, and that it could not have been small; a reader must not take that for evidence of no difference."""
    p, attainable = row["p_sign_flip"], row["p_attainable"]
    if p is None or p != p:
        return "–"
    return f"{p:.3f}" + (" †" if attainable is None or attainable > LEVEL else "")

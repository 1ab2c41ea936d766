"""``kvprobe map``: perturbation of every head, layer and cache size by two policies."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe import records
from kvprobe.commands.console import console, documents_line, interval, per_cent, table_of, written
from kvprobe.commands.running import Experiment

if TYPE_CHECKING:
    from kvprobe.maps import Result, Settings


def map_(name: str, settings: Settings, out: Path | None, arguments: dict[str, Any]) -> tuple[dict[str, Any], Result]:
    """Map two policies over documents; with ``out``, write tables, figures and a manifest there."""
    from kvprobe import maps

    def described(summary: dict[str, Any]) -> dict[str, Any]:
        plain = {name: getattr(settings, name) for name in ("cache", "budgets", "measure", "norm", "seed")}
        return plain | {"reading": asdict(settings.reading), "policies": summary["policies"]}

    return Experiment("map", maps, settings, described, _write, "documents").perform(name, out, arguments)


def _write(run: records.Run, result: Result, summary: dict[str, Any]) -> None:
    from kvprobe import plots

    heads, layers, budgets = result.head_rows(), result.layer_rows(), result.budget_rows()
    tables = {"cells": result.heads, "runs": result.layers, "heads": heads, "layers": layers, "budgets": budgets}
    for name, table in tables.items():
        run.table(table, f"{name}.parquet")
    for name, figure in plots.map_figures(heads, layers, budgets, summary).items():
        run.figure(figure, f"{name}.png")


MEASURES = {"mass": "evicted mass a_S", "L": "perturbation L", "centred": "centred bound θ_c", "bound": "bound θ"}


FEW = 6
"""Documents below which the interval of a share covers less than it says (see ``maps.share_reduced``)."""


def print_map(summary: dict[str, Any], out: Path | None) -> None:
    """The summary as tables for a person."""
    screen = console()
    screen.print(
        f"{summary['against']} against {summary['policy']} on {summary['model']}, {per_cent(summary['cache'])} of the "
        f"cache kept: {documents_line(summary)}, L{summary['norm']}"
    )
    screen.print(summary["semantics"])
    screen.print(_heads_table(summary))
    for name, block in summary["presets"].items():
        screen.print(_heads_line(name, block))
    if summary["n_docs"] < FEW:
        screen.print(f"fewer than {FEW} documents: the intervals of shares are too narrow")
    if published := summary["published"]:
        shares = ", ".join(f"{model} {per_cent(share)}" for model, share in published["share"].items())
        screen.print(f"the paper's share, of other models and documents: {shares}: {published['source']}")
    for note in summary["notes"]:
        facts = ", ".join(f"{key} {value}" for key, value in note.items() if key not in ("policy", "cache"))
        screen.print(f"{note['policy']} at {per_cent(note['cache'])}: {facts}")
    screen.print(_layers_table(summary))
    screen.print(_budgets_table(summary))
    if summary["caches_left_out"]:
        left = ", ".join(per_cent(cache) for cache in summary["caches_left_out"])
        screen.print(
            f"left out: {left} (of {summary['compressed_tokens']['min']} tokens, fewer than the policies always keep)"
        )
    screen.print(f"{summary['timings_s']['total_s']:.0f} s, peak memory {summary['peak_rss_mib']:.0f} MiB")
    if out is not None:
        screen.print(written(out))


def _heads_table(summary: dict[str, Any]) -> Any:
    table = table_of(
        f"Share of the {summary['heads_reduced']['n_heads']} heads whose mean over documents is lower under "
        f"{summary['against']} [95 % over documents]",
        ["preset", *MEASURES.values()],
    )
    for name, block in summary["presets"].items():
        cells = [block["by_measure"][measure] for measure in MEASURES]
        table.add_row(name, *(f"{per_cent(cell['share'])} {_interval(cell)}" for cell in cells))
    return table


def _interval(row: dict[str, Any]) -> str:
    low, high = row["ci_low"], row["ci_high"]
    return "[no interval]" if low is None or low != low else f"[{100 * low:.0f}, {100 * high:.0f}]"


def _heads_line(name: str, block: dict[str, Any]) -> str:
    found, why = block["heads_reduced"], block["why"]
    tested = (
        "no head could be significant at this number of documents"
        if found["cannot_reject"]
        else f"{found['significantly_lower']} heads significantly lower, {found['significantly_higher']} higher "
        f"(Wilcoxon, BH at {found['level']:g})"
    )
    if not found["cannot_reject"] and found["heads_needed"] > 1:
        tested += f"; none can be unless {found['heads_needed']} heads agree in all documents"
    if found["n_equal"]:
        tested += f"; {found['n_equal']} heads equal"
    if not why["n_heads"]:
        return f"{name}: {tested}"
    return (
        f"{name}: {tested}; medians over heads: evicted mass {_times(why['median_log_mass'])}, its distance from what "
        f"is kept {_times(why['median_log_distance'])}"
    )


def _times(log_ratio: float) -> str:
    from math import exp

    return f"× {exp(log_ratio):.2f}"


SHOWN = 8


def _layers_table(summary: dict[str, Any]) -> Any:
    from kvprobe.maps import MEASURES as MEASURED

    layers = summary["layers"]
    n = len(layers["layer"])
    places = sorted({round(i * (n - 1) / (SHOWN - 1)) for i in range(SHOWN)}) if n > SHOWN else list(range(n))
    table = table_of(
        f"Perturbation by layer, preset {summary['preset']}: {MEASURED[summary['measure']]}",
        ["layer", summary["policy"], summary["against"], "reduction [95 %]"],
        caption=None if len(places) == n else f"{len(places)} of {n} layers; the JSON has all",
    )
    for i in places:
        row = {name: layers[name][i] for name in ("ci_low", "ci_high")}
        table.add_row(
            str(layers["layer"][i]),
            f"{layers['base'][i]:.4g}",
            f"{layers['ours'][i]:.4g}",
            f"{layers['reduction'][i]:+.3g} {interval(row)}",
        )
    return table


def _budgets_table(summary: dict[str, Any]) -> Any:
    table = table_of(
        "Mean L over heads by share of the cache kept",
        ["preset", "cache", summary["policy"], summary["against"], "reduction [95 %]", "heads reduced [95 %]"],
    )
    for name, block in summary["presets"].items():
        for row in block["budgets"]:
            heads = {"ci_low": row["heads_low"], "ci_high": row["heads_high"]}
            table.add_row(
                name,
                per_cent(row["cache"]),
                f"{row['base']:.4g}",
                f"{row['ours']:.4g}",
                f"{row['reduction']:+.3g} {interval(row)}",
                f"{per_cent(row['heads_reduced'])} {_interval(heads)}",
            )
    return table

"""``kvprobe audit``: how tight the bounds are, Assumption 3.4, and sweeps of the second stage's settings."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe import records
from kvprobe.commands.console import console, documents_line, interval, per_cent, table_of, written
from kvprobe.commands.running import Experiment

if TYPE_CHECKING:
    from kvprobe.audits import Result, Settings


def audit(name: str, settings: Settings, out: Path | None, arguments: dict[str, Any]) -> tuple[dict[str, Any], Result]:
    """Audit the bounds over documents; with ``out``, write tables, figures and a manifest there."""
    from kvprobe import audits

    def described(summary: dict[str, Any]) -> dict[str, Any]:
        names = ("caches", "levels", "sweeps", "sweep_caches", "task", "items", "setting", "norm", "seed")
        plain = {name: getattr(settings, name) for name in names}
        return plain | {"reading": asdict(settings.reading), "policies": summary["policies"]}

    return Experiment("audit", audits, settings, described, _write, "documents").perform(name, out, arguments)


def _write(run: records.Run, result: Result, summary: dict[str, Any]) -> None:
    from kvprobe import plots

    tables = {"rows": result.rows(), "layers": result.layer_rows(), "heads": result.heads, "cells": result.layers}
    tables |= {name: table for name in ("sweeps", "scores") if (table := getattr(result, name)) is not None}
    for name, table in tables.items():
        run.table(table, f"{name}.parquet")
    for name, figure in plots.audit_figures(result, summary).items():
        run.figure(figure, f"{name}.png")


def print_audit(summary: dict[str, Any], out: Path | None) -> None:
    """The summary as tables for a person."""
    screen = console()
    screen.print(f"bounds on {summary['model']}: {documents_line(summary)}, L{summary['norm']}")
    screen.print(summary["semantics"])
    for level in dict.fromkeys(row["level"] for row in summary["rows"]):
        rows = [row for row in summary["rows"] if row["level"] == level]
        screen.print(_bounds_table(rows, level))
        screen.print(_stages_table(rows, level))
    published = summary["published"]
    if published:
        screen.print(_published_bounds(published["bounds"]))
    n_cells = sum(row["n_cells"] for row in summary["rows"])
    screen.print(
        f"L ≤ θ_c ≤ θ ≤ θ̂ ≤ relaxed bound, each of the same set: {summary['violations']} violations in {n_cells} "
        "cells (heads and layers, both policies)"
    )
    screen.print(_assumption_table(summary["rows"]))
    if published:
        screen.print(_published_assumption(published["assumption"]))
    for kind in dict.fromkeys(row["sweep"] for row in summary["sweeps"]):
        screen.print(_sweep_table(summary, kind))
    screen.print(f"{summary['timings_s']['total_s']:.0f} s, peak memory {summary['peak_rss_mib']:.0f} MiB")
    if out is not None:
        screen.print(written(out))


LEVELS = {
    "layer": "a layer: L of the summed change, bounds summed over heads",
    "head": "a head: L and bounds of each head",
}


def _bounds_table(rows: list[dict[str, Any]], level: str) -> Any:
    columns = ["base", "preset", "cache", "L", "θ_c", "θ", "θ_c/L", "θ/L"]
    table = table_of(f"Averages over {LEVELS[level]}", columns, 2)
    names = ("actual", "centred_bound", "bound", "centred_over_actual", "bound_over_actual")
    for row in rows:
        table.add_row(*_about(row), *(_short(row[name]) for name in names))
    return table


def _stages_table(rows: list[dict[str, Any]], level: str) -> Any:
    columns = ["base", "preset", "cache", "heads", "θ", "θ̂", "prev.", "θ/prev.", "θ̂/prev.", "θ̂/θ̂ base", "θ̂ > prev."]
    table = table_of(
        f"The same by {level}, only heads with σ > ½, where θ̂ exists",
        columns,
        2,
        "prev.: relaxed bound of attention-only selection, another set; θ̂/θ̂ base: what the second stage does to θ̂",
    )
    for row in rows:
        bounds = (_short(row[name]) for name in ("bound_same_heads", "stage2_bound", "previous_bound"))
        ratios = (_ratio(row[name]) for name in ("ratio_bound", "ratio", "ratio_selection"))
        table.add_row(*_about(row), _ratio(row["share_valid"]), *bounds, *ratios, _ratio(row["share_above_previous"]))
    return table


def _about(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["base"], row["preset"], per_cent(row["cache"])


def _ratio(value: float | None) -> str:
    return "–" if value is None or value != value else f"{100 * value:.1f} %"


def _short(value: float | None) -> str:
    if value is None or value != value:
        return "–"
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"


def _published_bounds(fact: dict[str, Any]) -> str:
    rows = "; ".join(
        f"{per_cent(row['cache'])}: {row['actual']} / {row['bound']} / {row['previous_bound']} / "
        f"{per_cent(row['ratio'])} (bound ÷ actual {row['bound'] / row['actual']:.1f})"
        for row in fact["rows"]
    )
    return f"the paper's row, actual / bound / previous / ratio: {rows}: {fact['source']}, {fact['setting']}"


def _assumption_table(rows: list[dict[str, Any]]) -> Any:
    table = table_of(
        "Assumption 3.4: share of the heads with σ > ½ [95 % over documents], and heads whose mean σ is not",
        ["base", "preset", "cache", "set selected", "best set of that size", "heads failing", "with the best set"],
        2,
    )
    seen = set()
    for row in rows:
        key = (row["base"], row["preset"], row["cache"])
        if key in seen:
            continue
        seen.add(key)
        held = row["assumption"]
        cells = [_share(held, reading) for reading in ("selected", "oracle")]
        failing = [len(held["failing_heads"]), len(held["failing_heads_oracle"])]
        table.add_row(row["base"], row["preset"], per_cent(row["cache"]), *cells, *map(str, failing))
    return table


def _share(held: dict[str, Any], reading: str) -> str:
    low, high = held[f"share_{reading}_low"], held[f"share_{reading}_high"]
    ends = "[no interval]" if low is None or low != low else f"[{100 * low:.1f}, {100 * high:.1f}]"
    return f"{100 * held[f'share_{reading}']:.1f} % {ends}"


def _published_assumption(fact: dict[str, Any]) -> str:
    parts = [f"{row['model']} at {per_cent(row['cache'])}: {100 * row['share']:.2f} %" for row in fact["rows"]]
    return f"the paper's share: {'; '.join(parts)}: {fact['source']}, {fact['setting']}"


SHORT = {"alpha": "α", "epsilon": "ε", "norm": "p"}
NAMES = {"alpha": "α", "epsilon": "ε", "norm": "p of the value norm"}


def _sweep_table(summary: dict[str, Any], kind: str) -> Any:
    base = next(row["base"] for row in summary["sweeps"] if row["sweep"] == kind)
    task = ", ".join(dict.fromkeys(row["task"] for row in summary["scores"]))
    scored = {(row["preset"], row["cache"], row["value"]): row for row in summary["scores"] if row["sweep"] == kind}
    columns = ["preset", "cache", SHORT[kind], "L", "change of L [95 %]", "reduced"]
    columns += ["ε·n"] if kind == "epsilon" else []
    columns += ["score [95 %]", "Δ ln p"] if scored else []
    table = table_of(
        f"Sweep of {NAMES[kind]}: mean L, its change and the heads reduced against {base} without a second stage"
        + (f"; score and ln p (nats, against the whole cache) of {task}" if scored else ""),
        columns,
        1,
        "first stages that are smaller than what is kept in any case agree" if kind == "alpha" else None,
    )
    for row in (row for row in summary["sweeps"] if row["sweep"] == kind):
        cells = [row["preset"], per_cent(row["cache"]), f"{row['value']:g}", f"{row['L']:.4g}"]
        cells += [f"{row['change']:+.3g} {interval(row)}", per_cent(row["heads_reduced"])]
        cells += [f"{row['epsilon_n']:.2g}"] if kind == "epsilon" else []
        if scored:
            score = scored[row["preset"], row["cache"], row["value"]]
            cells += [f"{score['score']:.2f} {interval(score)}", f"{score['delta_logprob']:+.2f}"]
        table.add_row(*cells)
    return table

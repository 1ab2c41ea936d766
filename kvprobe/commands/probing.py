"""``kvprobe niah``: the needle probe."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe import records
from kvprobe.commands.console import console, interval, written
from kvprobe.commands.running import Experiment

if TYPE_CHECKING:
    from kvprobe.needles import Result, Settings


def niah(name: str, settings: Settings, out: Path | None, arguments: dict[str, Any]) -> tuple[dict[str, Any], Result]:
    """Run the needle probe; with ``out``, write tables, figures and a manifest there."""
    from kvprobe import needles

    return Experiment("niah", needles, settings, lambda _: asdict(settings), _write).perform(name, out, arguments)


def _write(run: records.Run, result: Result, summary: dict[str, Any]) -> None:
    from kvprobe import plots

    tables = {"items": result.items(), "spans": result.spans(), "heads": result.heads(), "arms": result.arms()}
    for name, table in tables.items():
        run.table(table, f"{name}.parquet")
    for name, figure in plots.niah_figures(tables, summary).items():
        run.figure(figure, f"{name}.png")


def print_niah(summary: dict[str, Any], out: Path | None) -> None:
    """The summary as tables for a person."""
    screen = console()
    screen.print(
        f"{summary['task']} on {summary['model']}: {summary['n_items']} items, length {summary['length']}, "
        f"seed {summary['seed']}, accuracy {summary['accuracy']:.2f}"
    )
    screen.print(_auroc_table(summary))
    screen.print(_ablation_table(summary))
    for key in ("gate", "gate_answer"):
        screen.print(_gate_line(summary[key]))
    screen.print(f"{summary['timings_s']['total_s']:.0f} s, peak memory {summary['peak_rss_mib']:.0f} MiB")
    if out is not None:
        screen.print(written(out))


def _auroc_table(summary: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(
        title="Which spans do heads attend to? Within-item AUROC of the evidence, mean over heads [95 % over items]",
        title_justify="left",
    )
    for column in ("feature", "against", "last prompt token", "answer tokens", "heads at 1.0 (last)"):
        table.add_column(column)
    planted = [name for label, name in (("hard", "other needles"), ("decoy", "decoys")) if summary["ablation"][label]]
    names = {"vs_hard": ", ".join(planted), "vs_distractor": "haystack (sanity)"}
    for contrast, label in names.items():
        last, answer = summary["auroc"][contrast], summary["auroc_answer"][contrast]
        for feature, row in (last or {}).items():
            table.add_row(
                feature, label, _interval(row), _interval(answer[feature]), f"{row['heads_at_1']} of {row['n_heads']}"
            )
    return table


def _ablation_table(summary: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(
        title="What does the answer lose when a span is cut out of the cache? (nats, mean over items)",
        title_justify="left",
    )
    for column in ("cut", "Δ log-prob of the answer", "KL", "accuracy", "spans"):
        table.add_column(column, justify="left" if column == "cut" else "right")
    for label in ("evidence", "hard", "decoy", "distractor"):
        row = summary["ablation"][label]
        if row:
            change = f"{row['delta_logprob']:+.2f} {interval(row)}"
            table.add_row(label, change, f"{row['kl']:.2f}", f"{row['accuracy']:.2f}", str(row["n_spans"]))
    return table


def _interval(row: dict[str, Any]) -> str:
    return f"{row['mean']:.3f} {interval(row)}"


GATED = {"hard": "other needles and decoys", "distractor": "haystack spans"}


def _gate_line(gate: dict[str, Any]) -> str:
    where = "last prompt token" if gate["at"] == "last" else "answer tokens"
    if gate["value"] is None:
        return f"gate at the {where}: {gate['verdict']}"
    value = gate["p_permutation"]
    p = ("p < 0.0001" if value < 1e-4 else f"p {value:.4f}") + (
        " (cannot reject at this n)" if gate["cannot_reject"] else ""
    )
    return (
        f"gate at the {where}: {gate['score']} of the evidence against {GATED[gate['contrast']]}, "
        f"AUROC {gate['value']:.3f} {interval(gate)}, "
        f"threshold {gate['threshold']}, {p}, n {gate['n']}: {gate['verdict']}"
    )

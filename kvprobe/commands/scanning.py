"""``kvprobe heads``: retrieval and reasoning heads, their check, and a head profile."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe import records
from kvprobe.commands.console import console, interval, per_cent, plural, table_of, written
from kvprobe.commands.running import Experiment

if TYPE_CHECKING:
    from kvprobe.heads import Result, Settings

SHOWN = 10


def heads(name: str, settings: Settings, out: Path | None, arguments: dict[str, Any]) -> tuple[dict[str, Any], Result]:
    """Scan a model's heads; with ``out``, write tables, figures, profiles, the rule's decision and a manifest there."""
    from kvprobe import heads as package

    return Experiment("heads", package, settings, lambda _: asdict(settings), _write, "trials").perform(
        name, out, arguments
    )


def _write(run: records.Run, result: Result, summary: dict[str, Any]) -> None:
    from kvprobe import plots
    from kvprobe.heads.rule import content

    tables = result.tables()
    for name, table in tables.items():
        run.table(table, f"{name}.parquet")
    for kind, profile in result.scan.profiles.items():
        path = run.json(profile.to_dict(), "profile.json" if kind == "retrieval" else f"profile_{kind}.json")
        if kind == "retrieval":
            summary["profile"] = str(path)
    origin = {name: summary[name] for name in ("task", "lengths", "depths", "seeds")}
    run.json(content(result.scan.rule, summary["model"], **origin), "exclude_layers.json")
    for name, figure in plots.scan_figures(tables, summary).items():
        run.figure(figure, f"{name}.png")


def print_heads(summary: dict[str, Any], out: Path | None) -> None:
    """The summary as tables for a person."""
    screen = console()
    lengths, depths = summary["lengths"], summary["depths"]
    screen.print(
        f"heads of {summary['model']}: {summary['task']}, {len(lengths)} lengths ({min(lengths)}–{max(lengths)} tokens)"
        f" × {plural(len(depths), 'depth')} × {plural(summary['needles'], 'needle')} × "
        f"{plural(len(summary['seeds']), 'seed')}"
    )
    for kind in ("retrieval", "reasoning"):
        screen.print(_kept(summary[kind], kind))
    screen.print(_top(summary))
    screen.print(_stability(summary))
    for line in _causal(summary["causal"]):
        screen.print(line)
    if summary["knockouts"] is not None:
        screen.print(_knockouts(summary))
    screen.print(_rule(summary["first_layers"]))
    screen.print(f"{summary['timings_s']['total_s']:.0f} s, peak memory {summary['peak_rss_mib']:.0f} MiB")
    if summary["profile"] is None:
        screen.print("no profile was written: --out DIR writes profile.json for headkv and duo")
    if out is not None:
        screen.print(written(out))


def _kept(row: dict[str, Any], kind: str) -> str:
    said = f"{kind} score: {row['n_kept']} of {row['n']} trials of {row['task']} kept ({row['kept_if']})"
    if row["share"] is None:
        return f"{said}: no score"
    return f"{said}; {row['n_heads_at_threshold']} heads ({per_cent(row['share'])}) at {row['threshold']:g} or more"


def _top(summary: dict[str, Any]) -> Any:
    table = table_of(
        f"Heads with the largest scores: share of the {summary['retrieval']['span']} copied (retrieval; above 1: "
        "copied twice), attention to it among the head's top positions (reasoning, R2)",
        ("rank", "retrieval: layer, head", "score", "reasoning: layer, head", "score"),
    )
    found = [summary[kind]["top"][:SHOWN] for kind in ("retrieval", "reasoning")]
    for rank in range(max(map(len, found))):
        cells = []
        for rows in found:
            layer, head, score = rows[rank] if rank < len(rows) else (None, None, None)
            cells += ["–", "–"] if score is None else [f"{layer}, {head}", f"{score:.3f}"]
        table.add_row(str(rank + 1), *cells)
    return table


def _stability(summary: dict[str, Any]) -> str:
    row, rho = summary["stability"], summary["rank_correlation"]
    beside = "" if rho is None else f"; retrieval against reasoning scores: {rho:.2f}"
    if row["rho"] is None:
        return f"stability over seeds: {row['why']}{beside}"
    return (
        f"stability over seeds: Spearman {row['rho']:.2f} {interval(row)} over {row['n_heads']} heads (bootstrap over "
        f"{row['n_cells']} cells of the grid), {_overlap(row)}{beside}"
    )


def _overlap(row: dict[str, Any]) -> str:
    return (
        "no head scores above 0"
        if row["overlap"] is None
        else f"{per_cent(row['overlap'])} of the top {row['top_k']} (of scores above 0) shared"
    )


def _causal(row: dict[str, Any]) -> list[str]:
    if row["top_k"] is None:
        return [f"causal check: {row['why']}"]
    few = f" (cannot reject: {row['p_attainable']:.2g} is the smallest p)" if row["cannot_reject"] else ""
    others = (
        f"as many other heads of the same layers: {row['random_k']:+.2f} ({plural(row['draws'], 'draw')} an item)"
        if not row["short"]
        else f"all {row['k'] - row['short']} other heads of the same layers ({row['short']} fewer: no fair "
        f"comparison): {row['random_k']:+.2f}"
    )
    zero = f", {row['scored_zero']} of them with score 0" if row["scored_zero"] else ""
    return [
        f"evidence masked in the top {row['k']} heads{zero}: {row['top_k']:+.2f} nats of the answer's log-prob; "
        f"in {others}",
        f"difference {row['difference']:+.2f} {interval(row)}, sign flip p {row['p_signflip']:.4f}{few}, n {row['n']} "
        f"answered of {row['n_items']}",
    ]


def _knockouts(summary: dict[str, Any]) -> str:
    row = summary["knockouts"]
    rho = ["–" if row[name] is None else f"{row[name]:.2f}" for name in ("kl_perturbation", "delta_perturbation")]
    return (
        f"evidence masked in one head at a time, {row['n_heads']} heads, one item: Spearman of KL with exact L "
        f"{rho[0]}, of |Δ log-prob| with L {rho[1]}; largest effect {row['worst']['delta_logprob']:+.2f} nats (layer "
        f"{row['worst']['layer']}, head {row['worst']['head']})"
    )


def _rule(row: dict[str, Any]) -> str:
    found, elsewhere = row["excluded"], row["n_failing_elsewhere"]
    said = f"layer{'s' * (len(found) > 1)} {', '.join(map(str, found))}" if found else "no layer"
    more = f"; {plural(elsewhere, 'head')} of other layers fail it, too" if elsewhere else ""
    return (
        f"first-layer rule ({row['rule_text']}): excludes {said}{more}. --out writes it as exclude_layers.json, for "
        "kvprobe niah --exclude-layers"
    )

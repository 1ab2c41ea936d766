"""``kvprobe placebo``: strength-matched placebo ablations."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe import records
from kvprobe.commands.console import console, interval, table_of, written
from kvprobe.commands.running import Experiment

if TYPE_CHECKING:
    from kvprobe.placebo import Result, Settings

UNITS = {"logprob": "Δ log-prob, nats", "kl": "KL, nats", "settling_depth": "Δ settling depth, layers"}
STRENGTH = {"bound": "θ", "perturbation": "L"}


def placebo(
    name: str, settings: Settings, out: Path | None, arguments: dict[str, Any]
) -> tuple[dict[str, Any], Result]:
    """Run a placebo experiment; with ``out``, write tables, figures and a manifest there."""
    return Experiment("placebo", _Package, settings, lambda _: asdict(settings), _write).perform(name, out, arguments)


class _Package:
    """The experiment in the words of :class:`Experiment`."""

    @staticmethod
    def validate(model: Any, settings: Settings) -> None:
        """See :func:`kvprobe.placebo.validate`."""
        from kvprobe import placebo

        placebo.validate(model, settings)

    @staticmethod
    def run(model: Any, settings: Settings, progress: Any, keep: Any) -> Result:
        """See :func:`kvprobe.placebo.run`."""
        from kvprobe import placebo

        return placebo.run(model, settings=settings, progress=progress, keep=keep)


def _write(run: records.Run, result: Result, summary: dict[str, Any]) -> None:
    from kvprobe import plots

    tables = result.tables()
    for name, table in tables.items():
        run.table(table, f"{name}.parquet")
    for name, figure in plots.placebo_figures(tables, summary).items():
        run.figure(figure, f"{name}.png")


def print_placebo(summary: dict[str, Any], out: Path | None) -> None:
    """The summary as tables for a person."""
    screen = console()
    score = "" if summary["accuracy"] is None else f", accuracy {summary['accuracy']:.2f}"
    answered = "" if summary["accuracy"] is None else f" ({summary['n_answered']} answered)"
    length = "" if summary["length"] is None else f", length {summary['length']}"
    screen.print(
        f"{summary['task']} on {summary['model']}: {summary['n_items']} items{answered}{length}, seed "
        f"{summary['seed']}{score}"
    )
    screen.print(summary["semantics"])
    screen.print(f"identity − clean: {summary['identity_max_abs']:g}")
    screen.print(_matching_table(summary))
    screen.print(_effects_table(summary))
    for match_on, found in summary["contrasts"].items():
        for line in _contrast_lines(match_on, found, summary):
            screen.print(line)
    if any(found["balance"] for found in summary["contrasts"].values()):
        screen.print(_balance_table(summary))
    if "by_k" in summary:
        _print_memory(screen, summary)
    screen.print(f"{summary['timings_s']['total_s']:.0f} s, peak memory {summary['peak_rss_mib']:.0f} MiB")
    if out is not None:
        screen.print(written(out))


def _matching_table(summary: dict[str, Any]) -> Any:
    table = table_of(
        "Is there an equally strong blow elsewhere? Targets by where their placebos come from (the strongest "
        "candidate's strength over the target's, median)",
        ("matched on", "matched", "contiguous", "hard", "hard_set", "token_set", "injected"),
    )
    for match_on, found in summary["contrasts"].items():
        cells = [f"{found['matched']} of {found['matched'] + found['unmatched']}"]
        for name, count in found["remedy"].items():
            ratio = found["strongest"].get(name)
            cells.append(f"{count}" if ratio is None else f"{count} ({ratio:.2f})")
        table.add_row(f"{match_on} ({STRENGTH[match_on]})", *cells)
    return table


def _effects_table(summary: dict[str, Any]) -> Any:
    table = table_of(
        "What does each arm do? Mean over the contrast's items",
        ("matched on", "arm", *UNITS.values()),
        left=2,
    )
    for match_on, found in summary["contrasts"].items():
        for arm, row in found["effect"].items():
            # A mean of integers that is zero may come out at −1e-16.
            cells = ["–" if row[name] is None else f"{round(row[name], 9) + 0.0:+.3g}" for name in UNITS]
            table.add_row(match_on, arm, *cells)
    return table


def _contrast_lines(match_on: str, found: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    row, outcome = found["contrast"], summary["outcome"]
    lines = []
    if found["unmatched"]:
        ratio = found["no_overlap_ratio"]
        reach = "" if ratio is None else f", the strongest window reaches {ratio:.2f} of a target (median)"
        instead = "vectors of equal L are injected" if found["kind"] == "injected" else "not part of the contrast"
        k, held = summary["placebos"], {name: n for name, n in found["within_caliper"].items() if n}
        some = ", ".join(f"{name} {n:g}" for name, n in held.items()) or "none"
        lines.append(
            f"{match_on}: no_overlap for {found['unmatched']} targets: no pool holds {k} separate placebos within the "
            f"caliper (candidates within, median: {some}){reach}; {instead}"
        )
    if row["n"] == 0:
        return [*lines, f"{match_on}: no contrast: {row['method']}"]
    p = "p < 0.0001" if row["p_permutation"] < 1e-4 else f"p {row['p_permutation']:.4f}"
    beside = f"sign flip {row['p_signflip']:.3g}, Wilcoxon {row['p_wilcoxon']:.3g}"
    verdict = ", cannot reject at this n" if row["cannot_reject"] else ""
    lines.append(
        f"{match_on}: {found['estimand']}: {UNITS[outcome]} {row['mean']:+.3g} {interval(row)}, n {row['n']}, "
        f"permutation within item {p} (smallest attainable {row['p_attainable']:.2g}{verdict}); {beside}"
    )
    if found["kind"] == "injected":
        lines[-1] += (
            ". Exploratory: an ordinary span's own Δo is milder than other vectors of its norm, so that true nulls "
            "are rejected too often, on that side"
        )
        own, cut = (found["effect"][name][outcome] for name in ("injected_target", "target"))
        lines.append(
            f"{match_on}: the clean run's changes add up over layers: the target's own Δo injected does {own:+.3g}; "
            f"cutting the target out {cut:+.3g}"
        )
    if row["p_permutation_all"] != row["p_permutation"]:
        lines[-1] += (
            f". The permutation is among placebos that share no token ({row['tested']:.2g} an item on average); among "
            f"all, whose effects go together, it would give {row['p_permutation_all']:.2g}"
        )
    return lines


def _balance_table(summary: dict[str, Any]) -> Any:
    table = table_of(
        "Balance of target and controls, in pre-match SDs: before (length-only windows) → after (placebos)",
        ("matched on", "variable", "before", "after", "max |ln ratio|"),
        left=2,
        caption="with fewer than 50 items |SMD| < 0.1 is noise: read 0.25 as a description, not as a test",
    )
    for match_on, found in summary["contrasts"].items():
        for variable, row in found["balance"].items():
            cells = [_smd(row, name) for name in ("before", "after")]
            ratio = "–" if row["max_abs_ln_ratio"] is None else f"{row['max_abs_ln_ratio']:.3g}"
            marked = f"{variable} (matched)" if row["matched"] else variable
            table.add_row(match_on, marked, *cells, ratio)
    return table


def _smd(row: dict[str, Any], name: str) -> str:
    value = row[f"smd_{name}"]
    if value is None:
        return "–"
    return f"{value:+.2f} {interval({'ci_low': row[f'{name}_low'], 'ci_high': row[f'{name}_high']})}"


def _print_memory(screen: Any, summary: dict[str, Any]) -> None:
    table = table_of(
        "Masking the first derivation: change of settling depth of later mentions, layers (+: deeper)",
        ("mention k", "effect", "Δ log-prob, nats", "items"),
    )
    for row in summary["by_k"]:
        table.add_row(
            str(row["k"]), f"{row['effect']:+.3g} {interval(row)}", f"{row['delta_logprob']:+.3g}", str(row["n"])
        )
    screen.print(table)
    chosen = summary["selectivity"]
    if chosen["mean"] is None:
        screen.print(f"selectivity: {chosen['why']}")
    else:
        screen.print(
            f"selectivity (effect on mentions minus effect on those worked out again): {chosen['mean']:+.3g} "
            f"{interval(chosen)} layers, n {chosen['n']}"
        )
    deep = summary["deep_ratio"]
    if deep["first"] is not None and deep["later"] is not None:
        ratio = "–" if deep["ratio"] is None else f"{deep['ratio']:.2f}"
        screen.print(
            f"deep tokens in the clean run: {deep['first']:.2f} of the first mention's, {deep['later']:.2f} of later "
            f"ones' (ratio {ratio})"
        )

"""``kvprobe sinks``: attention that is parked against attention that reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprobe import records
from kvprobe.commands.console import console, interval, plural, table_of, written
from kvprobe.commands.running import Experiment
from kvprobe.commands.sink_words import (
    AFTER_CAPTION,
    AUROC_CAPTION,
    BUCKETS_CAPTION,
    COURSES,
    COURSES_CAPTION,
    EPSILON_CAPTION,
    MEASURES,
    NAMES,
    RECOVERED,
    SIDES,
    SINKY,
)

if TYPE_CHECKING:
    from kvprobe.sinks import Result, Settings


def sinks(name: str, settings: Settings, out: Path | None, arguments: dict[str, Any]) -> tuple[dict[str, Any], Result]:
    """Score every key of every input; with ``out``, write tables, figures and a manifest there."""
    from kvprobe import sinks as package

    def described(summary: dict[str, Any]) -> dict[str, Any]:
        return dict(summary["settings"])

    unit = "items" if settings.task else "documents"
    return Experiment("sinks", package, settings, described, _write, unit).perform(name, out, arguments)


def _write(run: records.Run, result: Result, summary: dict[str, Any]) -> None:
    from kvprobe import plots

    tables = result.tables()
    for name, table in tables.items():
        run.table(table, f"{name}.parquet")
    for name, figure in plots.sink_figures(tables, summary).items():
        run.figure(figure, f"{name}.png")


def print_sinks(summary: dict[str, Any], out: Path | None) -> None:
    """The summary as tables for a person."""
    screen = console()
    for line in _about(summary):
        screen.print(line)
    screen.print(_buckets_table(summary))
    screen.print(_positions_table(summary))
    if summary["auroc"]["mass"]["n"]:
        screen.print(_auroc_table(summary))
        screen.print(_epsilon_table(summary))
    else:
        screen.print(f"evidence against the first 4 positions: not compared, {summary['auroc']['mass']['why']}")
    screen.print(_ranks_table(summary))
    for line in (*_sinky_lines(summary), *_secondary_lines(summary)):
        screen.print(line)
    if summary["after"]:
        screen.print(_after_table(summary))
    if summary["courses"]:
        screen.print(_courses_table(summary))
    screen.print(f"{summary['timings_s']['total_s']:.0f} s, peak memory {summary['peak_rss_mib']:.0f} MiB")
    if out is not None:
        screen.print(written(out))


def _about(summary: dict[str, Any]) -> list[str]:
    n, tokens = summary["n_items"], summary["tokens"]
    what = f"{summary['task'] or summary['docs']} on {summary['model']}: {plural(n, summary['unit'])}"
    score = "" if summary["accuracy"] is None else f", accuracy {summary['accuracy']:.2f}"
    cut = f", {summary['truncated']} truncated" if summary["truncated"] else ""
    p = summary["settings"]["p"]
    lines = [
        f"{what} of {_tokens(tokens)}{cut}, seed {summary['seed']}{score}; rows: "
        f"{summary['rows']}; ε {summary['epsilon']:g}, L{p} norm",
        summary["semantics"],
        summary["status"],
    ]
    excluded = summary["layers"]["excluded"]
    left_out = f"{'layer' if len(excluded) == 1 else 'layers'} left out, as stated before the run: "
    return lines + ([left_out + ", ".join(map(str, excluded))] if excluded else [])


def _tokens(found: dict[str, int]) -> str:
    """``322 tokens`` or ``300–322 tokens``."""
    low, high = found["min"], found["max"]
    return plural(high, "token") if low == high else f"{low}–{high} tokens"


def _buckets_table(summary: dict[str, Any]) -> Any:
    columns = (
        "bucket",
        "tokens",
        "attention [95 %]",
        "s / token",
        "(s+ε) m / token",
        "ρ [95 %]",
        "rel. ρ",
        "n",
    )
    table = table_of("Where attention goes, and what value comes with it", columns, caption=BUCKETS_CAPTION)
    for name, row in summary["buckets"].items():
        if row is None:
            continue
        table.add_row(
            NAMES[name],
            "–" if name == "learned_sink" else f"{row['n_tokens']:.0f}",
            f"{100 * row['share']:.1f} % {_shares(row['ci']['share'])}",
            _form(row["mass_per_token"], ".2e"),
            _form(row["value_mass_per_token"], ".2e"),
            _with(_number(row["ratio"]), row["ci"]["ratio"]),
            _number(row["relative_ratio"], 2),
            str(row["n"]),
        )
    return table


def _positions_table(summary: dict[str, Any]) -> Any:
    table = table_of(
        "The first four positions one by one [95 % over inputs]; s: mean over the rows that see it; rel. m: norm over "
        "its head's median, mean over heads",
        ("place", "s", "value mass", "ρ", "rel. m", "n"),
    )
    for row in summary["positions"]:
        table.add_row(
            str(row["place"]),
            _with(_form(row["mass"]), row["ci"]["mass"]),
            _with(_form(row["value_mass"]), row["ci"]["value_mass"]),
            _with(_number(row["ratio"]), row["ci"]["ratio"]),
            _with(_number(row["relative_norm"], 2), row["ci"]["relative_norm"]),
            str(row["n"]),
        )
    return table


def _auroc_table(summary: dict[str, Any]) -> Any:
    table = table_of(
        "Evidence against the first four positions: AUROC within inputs = P(evidence token > first4 token) "
        "[95 % over inputs]",
        ("measure", "pooled over heads, layers", "within a head, mean", "first position alone", "n"),
        caption=AUROC_CAPTION,
    )
    for name, label in MEASURES.items():
        pooled, heads = summary["auroc"][name], summary["auroc_heads"].get(name)
        cells = [_auroc(pooled), "" if heads is None else _auroc(heads), _auroc(summary["auroc_first_position"][name])]
        table.add_row(label, *cells, str(pooled["n"]))
    return table


def _auroc(row: dict[str, Any]) -> str:
    return "–" if row["mean"] is None else f"{row['mean']:.3f} {interval(row)}"


def _sinky_lines(summary: dict[str, Any]) -> list[str]:
    row = summary["heads_sinky"]
    lines = [
        f"{SINKY} {row['threshold']:g}: "
        f"{100 * row['share']:.1f} % of {row['n_heads']} {_shares((row['ci_low'], row['ci_high']))}, n {row['n']}"
    ]
    if learned := summary["learned_sink"]:
        lines.append(f"learned sinks take {100 * learned['mean']:.1f} % of attention")
    return lines


def _epsilon_table(summary: dict[str, Any]) -> Any:
    table = table_of(
        "Value mass of the evidence (E) and of the first four positions (F) for every ε: which has more?",
        ("ε", "E", "F", "E − F [95 %]", "in all", "per token", "per mass", "AUROC [95 %]"),
        caption=EPSILON_CAPTION,
    )
    for row in summary["epsilon_sweep"]:
        verdict, mass, difference = row["verdict"], row["value_mass"], row["difference"]["value_mass"]
        table.add_row(
            f"{row['epsilon']:g}",
            _form(mass.get("evidence")),
            _form(mass.get("first4")),
            _with(_form(difference["mean"], "+.3g"), _ends(difference)),
            *(SIDES[verdict[name]] for name in ("value_mass", "value_mass_per_token", "value_per_mass")),
            _auroc(row["auroc"]),
        )
    return table


def _ranks_table(summary: dict[str, Any]) -> Any:
    table = table_of(
        "What ε does to the order of keys (Spearman within a head, mean over heads and inputs)",
        ("ε", "(s + ε) m with s m", "ρ with ε inside, with m", "ρ with ε inside, with −s"),
        caption="why ρ has no ε: where ε is not far below s, m (1 + ε/s) ranks keys by how little attention they get",
    )
    for row in summary["epsilon_sweep"]:
        names = ("spearman_value_mass", "spearman_ratio_norm", "spearman_ratio_mass")
        table.add_row(f"{row['epsilon']:g}", *(_number(row[name], 2) for name in names))
    return table


def _secondary_lines(summary: dict[str, Any]) -> list[str]:
    found = summary["secondary"]
    if found is None:
        return []
    texts = ", ".join(f"{text!r} × {count}" for text, count in found["texts"][:6])
    elsewhere = found["n_tokens_in_other_buckets"]
    counted = f" ({elsewhere:.1f} of them counted as evidence, which has a token first)" if elsewhere else ""
    lines = [
        f"secondary sinks (all four conditions in some layer): {found['n_tokens']['mean']:.1f} tokens an input"
        f"{counted}, in {found['n_inputs_with']} of {plural(found['n_inputs'], 'input')}{': ' + texts if texts else ''}"
    ]
    for label, name in (("all_four", "the label"), ("residual_only", "its two conditions on hidden states alone")):
        aurocs = found["recovery"][label]["auroc"]
        if aurocs["ratio"]["n"]:
            said = ", ".join(f"{word} {_auroc(aurocs[key])}" for key, word in RECOVERED.items())
            lines.append(f"  AUROC for {name}, within layers: {said} (n {aurocs['ratio']['n']})")
    return [*lines, f"  {found['note']}"]


def _after_table(summary: dict[str, Any]) -> Any:
    readings = summary["after"]["readings"]
    table = table_of(
        f"With the evidence masked: change of each bucket's share of attention (percentage points) [95 % over "
        f"{plural(summary['after']['n'], 'item')}]",
        ("bucket", *readings, "ρ before → after"),
        caption=AFTER_CAPTION,
    )
    for name in readings["corrected"]:
        rows = [found[name] for found in readings.values()]
        cells = [f"{100 * row['share_change']['mean']:+.2f} {_shares(_ends(row['share_change']), 2)}" for row in rows]
        table.add_row(NAMES[name], *cells, f"{_number(rows[0]['ratio_before'])} → {_number(rows[0]['ratio_after'])}")
    return table


def _courses_table(summary: dict[str, Any]) -> Any:
    found = summary["courses"]
    n = len(found["n"])
    places = sorted({0, 1, n // 2, n - 1} & set(range(n)))
    table = table_of(
        f"While generating (mean over {plural(found['n_items'], 'item')}, heads, layers): share of attention, and ρ",
        ("bucket", *(f"token {place} (n {found['n'][place]})" for place in places)),
        caption=COURSES_CAPTION,
    )
    for name, rows in found["buckets"].items():
        cells = [f"{100 * rows['mass'][place]:.1f} %, ρ {_number(rows['ratio'][place])}" for place in places]
        table.add_row((NAMES | COURSES).get(name, name), *cells)
    return table


def _ends(row: dict[str, Any]) -> tuple[float | None, float | None]:
    return row["ci_low"], row["ci_high"]


def _form(value: float | None, form: str = ".3g") -> str:
    """A number; a dash where there is none."""
    return "–" if value is None or value != value else f"{value:{form}}"


def _with(said: str, ends: Any) -> str:
    """A number and its interval; a dash alone where there is no number."""
    return said if said == "–" else f"{said} {_pair(ends)}"


def _pair(ends: Any) -> str:
    low, high = ends
    return "[no interval]" if low is None else f"[{low:.3g}, {high:.3g}]"


def _shares(ends: Any, digits: int = 1) -> str:
    low, high = ends
    return "[no interval]" if low is None else f"[{100 * low:.{digits}f}, {100 * high:.{digits}f}]"


def _number(value: float | None, digits: int = 1) -> str:
    return _form(value, f".{digits}f")

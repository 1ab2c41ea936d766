"""Does the primary test of a placebo contrast reject at its level when nothing is there?

    python analyses/placebo_calibration.py --out out/placebo_calibration

The target is replaced by a random span that is no evidence, its placebos are found by the library's own rule, and the
primary test is applied, again and again, on a table of effects that is measured once. What is claimed holds for these
items: they are not drawn again. Writes ``rows.parquet`` (a row a remedy × matching × reading), ``effects.parquet`` (a
row a span that was cut or injected), the figure and a manifest.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from calibrating import calibrate
from common import Analysis, progress
from pseudo_targets import DESIGNS, READINGS, Probe, Reading
from span_effects import items, whole

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvprobe.tasks.items import Item

STRENGTHS = {"bound": "θ", "perturbation": "L"}
HAYSTACKS = ("essay", "noise")
CLAIM = "conditional on these items: draws are of pseudo-targets, not of items"
SIZES = {
    "items": "items of each design on essays",
    "noise_items": "items of the noise haystack",
    "length": "tokens of an item",
    "needles": "needles of an item with needles never asked about",
    "crowd": "needles of an item that is crowded with them",
    "windows": "random windows an item",
    "unions": "unions of needles never asked about an item, small ones first",
    "deals": "deals of token sets an item",
    "blocks": "blocks of windows an item whose Δo is injected",
    "placebos": "placebos of a pseudo-target",
    "draws": "draws a remedy and reading",
    "permutations": "Monte Carlo draws of the primary test, where it is not exact",
}
BAND, GREY, SMALLEST = "#d9d9d9", "#595959", 1e-7
LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "rate": ("permutation within item, inside", {"marker": "o", "color": "#0072B2", "zorder": 4}),
    "outside": ("permutation within item, outside", {"marker": "X", "color": "#D55E00", "zorder": 4}),
    "signflip": ("sign flip", {"marker": "s", "color": GREY, "markerfacecolor": "none", "markersize": 5}),
    "wilcoxon": ("Wilcoxon", {"marker": "^", "color": GREY, "markerfacecolor": "none", "markersize": 5}),
}

__all__ = ["ANALYSIS", "compute", "main", "plan", "plot"]


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a run."""

    made: dict[str, list[Item]] = field(repr=False)
    items: int = 6
    noise_items: int = 4
    length: int = 1100
    needles: int = 9
    crowd: int = 25
    windows: int = 40
    unions: int = 48
    deals: int = 6
    blocks: int = 1
    placebos: int = 4
    caliper: float = 0.25
    draws: int = 1000
    permutations: int = 1999
    seed: int = 0


def plan(model: Any, **asked: Any) -> Plan:
    """Check everything, and make the items: see :class:`Plan` for what can be asked."""
    from kvprobe.errors import TaskError, quote

    planned = Plan({}, **asked)
    least = {"items": 2, "noise_items": 0, "length": 1, "needles": 2, "crowd": 2, "windows": 1, "unions": 0, "deals": 0}
    least |= {"blocks": 0, "placebos": 1, "draws": 1, "permutations": 1, "seed": 0}
    whole({name: (getattr(planned, name), low) for name, low in least.items()})
    if not 0 < planned.caliper < float("inf"):
        raise TaskError(f"caliper is {quote(planned.caliper)}, must be a number above 0")
    for design, task in DESIGNS.items():
        count = planned.noise_items if design == "noise" else planned.items
        needles = planned.crowd if design == "crowd" else planned.needles
        planned.made[design] = items(model, task, count, planned.length, planned.seed, needles)
    return planned


def compute(model: Any, asked: Plan) -> pd.DataFrame:
    """Rates of p < 0.05 of every remedy and reading.

    Returns
    -------
    DataFrame
        ``remedy``, ``design``, ``reading``, ``match_on``: where placebos come from, in which items, what the
        pseudo-target is (:data:`pseudo_targets.READINGS`), and what is matched; ``targets``, ``unmatched``:
        pseudo-targets in all, and those without placebos, which are never drawn; then see
        :func:`calibrating.calibrate`. ``attrs["tables"]``: ``effects``, a row a span × item.
    """
    import pandas as pd

    probes = [Probe.of(model, *job, asked) for job in progress("items")(_numbered(asked))]
    rows = [row(probes, reading, asked) for reading in READINGS]
    effects = pd.concat([each for probe in probes for each in probe.tables.values()], ignore_index=True)
    table = pd.DataFrame(rows)
    table.attrs = {"tables": {"effects": effects}, "about": _about(model, probes, asked)}
    return table


def _numbered(asked: Plan) -> list[tuple[str, Item, int]]:
    return [(design, item, index) for design, made in asked.made.items() for index, item in enumerate(made)]


def row(probes: Sequence[Probe], reading: Reading, asked: Plan) -> dict[str, Any]:
    """One reading over all items of its design."""
    mine = [probe for probe in probes if probe.design == reading.design]
    found = [probe.groups(reading, asked) for probe in mine]
    injected = reading.remedy == "injected"
    targets = sum(len(probe.injected) if injected else len(probe.sets[reading.kind]) for probe in mine)
    named = {"remedy": reading.remedy, "design": reading.design, "reading": reading.name, "match_on": reading.match_on}
    counted = {"targets": targets, "unmatched": targets - sum(map(len, found))}
    return named | counted | calibrate(found, asked.draws, asked.seed, asked.permutations)


def _about(model: Any, probes: Sequence[Probe], asked: Plan) -> dict[str, Any]:
    counts = {}
    for design in asked.made:
        mine = [probe for probe in probes if probe.design == design]
        counts[design] = {"items": len(mine), "answered": sum(probe.answered for probe in mine)}
    named = {name: getattr(asked, name) for name in (*SIZES, "caliper")}
    semantics = "prefill-then-evict: masks act on question and teacher-forced answer"
    facts = {"model": model.name, "seed": asked.seed, "semantics": semantics, "claim": CLAIM}
    return facts | {"asked": named, "designs": counts, "random_spans": random_spans(probes)}


def random_spans(probes: Sequence[Probe]) -> list[dict[str, Any]]:
    """What random windows do in each haystack: how large, how many exactly 0, how many change an argmax."""
    import pandas as pd

    rows = []
    for name in HAYSTACKS:
        tables = [probe.tables["contiguous"] for probe in probes if probe.design == name]
        if tables:
            every = pd.concat(tables)
            size, clean = every["effect"].abs(), [probe.clean for probe in probes if probe.design == name]
            row = {
                "haystack": name,
                "spans": len(size),
                "exactly_0": int((size == 0).sum()),
                "least": float(size.min()),
            }
            row |= {"median": float(size.median()), "largest": float(size.max())}
            rows.append(row | {"flips": int((every["flips"] > 0).sum()), "clean": [min(clean), max(clean)]})
    return rows


def plot(df: pd.DataFrame) -> Figure:
    """Rates against their bands, and the effects of random spans in both haystacks."""
    from kvprobe.plots.style import styled

    figure: Figure = styled(_drawn)(df)
    return figure


def _drawn(df: pd.DataFrame) -> Figure:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    from kvprobe.plots.style import WIDTH, headline, sheet

    about, asked = df.attrs["about"], df.attrs["about"]["asked"]
    figure = sheet(WIDTH, 1.9 + 0.24 * len(df))
    rates, effects = figure.subplots(1, 2, width_ratios=(2, 1))
    _rates(rates, df)
    _effects(effects, df.attrs["tables"]["effects"])
    said = (
        f"{about['model']} · {asked['items']} items of {asked['length']} tokens · {asked['placebos']} placebos · "
        f"caliper {asked['caliper']:g} · {asked['draws']} draws · seed {about['seed']}"
    )
    note = (
        f"Grey: 99 % band around the level that the primary test can attain (tick). {CLAIM[0].upper()}{CLAIM[1:]}; n "
        "counts those with a pseudo-target that has placebos. H: a needle never asked about "
        f"({asked['needles'] - 1} an item, {asked['crowd'] - 1} in a crowd). Unions: the test is among placebos that "
        "share no needle; all k may share them, the target never does."
    )
    handles = [Line2D([], [], linestyle="none", **look, label=text) for text, look in LOOKS.values()]
    handles.append(Patch(color=BAND, label="99 % band"))
    headline(figure, "Does the test reject at its level when nothing is there?", said, note, handles, ncols=5)
    return figure


def _rates(ax: Any, df: pd.DataFrame) -> None:
    import numpy as np

    places = len(df) - 1 - np.arange(len(df))
    for y, each in zip(places, df.to_dict("records"), strict=True):
        ax.fill_betweenx([y - 0.32, y + 0.32], each["low"], each["high"], color=BAND, linewidth=0)
        ax.plot([each["level"]] * 2, [y - 0.32, y + 0.32], color=GREY, linewidth=1)
    for name, (_, look) in LOOKS.items():
        shown = df["inside"] if name == "rate" else ~df["inside"] if name == "outside" else df["draws"] > 0
        ax.plot(df["rate" if name == "outside" else name][shown], places[shown], linestyle="none", **look)
    ax.set_yticks(places, [label(each) for each in df.to_dict("records")])
    ax.set_xlim(left=0)
    ax.set_xlabel("rate of p < 0.05")
    ax.set_title("pseudo-targets against their placebos")


def label(row: dict[str, Any]) -> str:
    """A row's name in figure and report."""
    matched = f" = {STRENGTHS[row['match_on']]}" if row["remedy"] != "injected" else ""
    where = f", {row['design']}" if row["design"] != "essay" else ""
    return f"{row['remedy']}{matched}: {row['reading']}{where}, n {row['n_items']}"


def _effects(ax: Any, effects: pd.DataFrame) -> None:
    """Share of random windows whose effect is at most so large."""
    import numpy as np

    for name, colour in zip(HAYSTACKS, ("#0072B2", "#D55E00"), strict=True):
        mine = effects[(effects["design"] == name) & (effects["kind"] == "contiguous")]["effect"].abs()
        if len(mine):
            size = np.sort(np.maximum(mine, SMALLEST))
            ax.step(
                size, np.arange(1, len(size) + 1) / len(size), where="post", color=colour, label=f"{name}, {len(size)}"
            )
    ax.set_xscale("log")
    ax.set_ylim(0, 1.02)
    ax.set_xlabel("|Δ log-prob|, nats")
    ax.set_ylabel("share of random windows")
    ax.set_title("random windows, by haystack")
    ax.legend(fontsize=8)


def report(df: pd.DataFrame) -> None:
    """Print rates and bands for a person."""
    about = df.attrs["about"]
    counts = "; ".join(
        f"{name}: {each['items']} items, {each['answered']} answered" for name, each in about["designs"].items()
    )
    print(f"{about['model']}, {counts}. {about['semantics']}\n{about['claim']}\n")
    print(f"{'':48s} rate of p < 0.05 [99 % band] attainable   sign flip, Wilcoxon   draws (all zero)   unmatched")
    for each in df.to_dict("records"):
        print(f"{label(each):48s}" + _line(each))
    print("\nrandom windows, |Δ log-prob of the gold answer| in nats:")
    for each in about["random_spans"]:
        ends = f"{each['clean'][0]:.3g} … {each['clean'][1]:.3g}"
        print(
            f"  {each['haystack']}: {each['spans']} windows, exactly 0: {each['exactly_0']}, least "
            f"{each['least']:.2g}, median {each['median']:.2g}, largest {each['largest']:.2g}; another argmax: "
            f"{each['flips']}; clean log-prob {ends}"
        )


def _line(row: dict[str, Any]) -> str:
    """Where a rate is outside, what speaks against exchangeability, too."""
    if not row["draws"]:
        return f" no draws: {row['targets']} pseudo-targets, {row['unmatched']} without placebos"
    verdict = "inside" if row["inside"] else "OUTSIDE"
    text = (
        f" {row['rate']:.4f} [{row['low']:.4f}, {row['high']:.4f}] {verdict:7s} {row['level']:.4f}   "
        f"{row['signflip']:.4f}, {row['wilcoxon']:.4f}   {row['draws']} ({row['all_zero']})   "
        f"{row['unmatched']} of {row['targets']}"
    )
    if row["datasets"] < math.log10(row["draws"]):
        text += f"; only {10 ** row['datasets']:.0f} different draws exist: says little"
    if not row["inside"]:
        text += (
            f"; pseudo-target farthest from its group's mean in {100 * row['farthest']:.0f} %, hurts more in "
            f"{100 * row['hurts']:.0f} % of rejections"
        )
    return text


def _options(parser: argparse.ArgumentParser) -> None:
    usual = Plan({})
    for name, text in SIZES.items():
        kind = {"type": type(getattr(usual, name)), "default": getattr(usual, name)}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind, help=f"{text} (%(default)s)")
    parser.add_argument("--caliper", type=float, default=usual.caliper, help="largest |ln ratio| (%(default)s)")


ANALYSIS = Analysis("placebo_calibration", (__doc__ or "").splitlines()[0], _options, plan, compute, plot, report)
main = ANALYSIS.main

if __name__ == "__main__":
    sys.exit(main())

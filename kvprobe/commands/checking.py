"""``kvprobe check``: the capability report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvprobe.commands.console import console
from kvprobe.errors import CapabilityError

if TYPE_CHECKING:
    from rich.table import Table

    from kvprobe.capability import LayerReport, Report


def check(name: str) -> Report | CapabilityError:
    """Load a model; its capability check runs on the way. What it refuses is returned, not raised."""
    from kvprobe.models import load

    try:
        return load(name).report
    except CapabilityError as error:
        return error


def print_report(report: Report) -> None:
    """The capability report as tables for a person."""
    from rich.table import Table

    facts = Table(title=f"{report.model} ({report.architecture}): every layer can be masked", title_justify="left")
    facts.add_column("check")
    facts.add_column("largest difference", justify="right")
    for name, value in report.to_dict().items():
        if isinstance(value, float):
            facts.add_row(name.replace("_", " "), f"{value:.2g}")
    screen = console()
    screen.print(facts)
    screen.print(_layers(report.layers))
    screen.print(
        f"prefill attention: {report.attention}; weights: {report.processing}; "
        f"{report.shared_parameters} parameters shared with the twin"
    )
    screen.print("versions: " + ", ".join(f"{name} {version}" for name, version in report.versions.items()))


def print_refusal(error: CapabilityError) -> None:
    """What was found of a refused model's layers, as far as the check got; the reason itself is the error's message."""
    from kvprobe.capability import LayerReport

    layers = [LayerReport(**layer) for layer in error.facts.get("layers", ())]
    if layers:
        console().print(_layers(layers))


def _layers(layers: Sequence[LayerReport]) -> Table:
    from rich.table import Table

    table = Table(title="layers", title_justify="left")
    for column in ("layers", "attention class", "maskable", "window", "soft-cap", "learned sink"):
        table.add_column(column)
    for first, last, kind in _runs(layers):
        table.add_row(f"{first}–{last}" if last > first else str(first), *kind)
    return table


def _runs(layers: Sequence[LayerReport]) -> Iterable[tuple[int, int, tuple[str, ...]]]:
    """Neighbouring layers of one kind as one row."""
    rows: list[tuple[int, int, tuple[str, ...]]] = []
    for layer in layers:
        kind = (
            layer.kind,
            {True: "yes", False: "NO", None: "not tried"}[layer.maskable],
            *(str(v) if v else "–" for v in (layer.window, layer.softcap, layer.sink)),
        )
        if rows and rows[-1][2] == kind:
            rows[-1] = (rows[-1][0], layer.index, kind)
        else:
            rows.append((layer.index, layer.index, kind))
    return rows

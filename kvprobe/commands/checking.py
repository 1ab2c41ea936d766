"""``kvprobe check``: the capability report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvprobe.commands.console import console
from kvprobe.errors import CapabilityError

if TYPE_CHECKING:
    from kvprobe.capability import Report


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
    layers = Table(title="layers", title_justify="left")
    for column in ("layers", "attention class", "maskable", "window", "soft-cap", "learned sink"):
        layers.add_column(column)
    for first, last, kind in _runs(report):
        layers.add_row(f"{first}–{last}" if last > first else str(first), *kind)
    screen = console()
    screen.print(facts)
    screen.print(layers)
    screen.print(
        f"prefill attention: {report.attention}; weights: {report.processing}; "
        f"{report.shared_parameters} parameters shared with the twin"
    )
    screen.print("versions: " + ", ".join(f"{name} {version}" for name, version in report.versions.items()))


def _runs(report: Report) -> Iterable[tuple[int, int, tuple[str, ...]]]:
    """Neighbouring layers of one kind as one row."""
    rows: list[tuple[int, int, tuple[str, ...]]] = []
    for layer in report.layers:
        kind = (
            layer.kind,
            "yes" if layer.maskable else "NO",
            *(str(v) if v else "–" for v in (layer.window, layer.softcap, layer.sink)),
        )
        if rows and rows[-1][2] == kind:
            rows[-1] = (rows[-1][0], layer.index, kind)
        else:
            rows.append((layer.index, layer.index, kind))
    return rows

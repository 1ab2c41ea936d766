"""What the figures of ``kvprobe sinks`` share: the look of each class of positions, and what a subtitle says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvprobe.plots.style import GREY, Look, plural

CLASSES = {
    "other": Look("other context", GREY, "o", 3, filled=False),
    "recent": Look("question and answer", "#56B4E9", "v", 4.5),
    "secondary_sink": Look("secondary sink", "#009E73", "P", 7),
    "evidence": Look("evidence", "#D55E00", "*", 7),
    "first4": Look("first 4 positions", "#7B3294", "D", 6),
}
"""Bucket → look, the one on top last."""
EXPLORATORY = "exploratory"


def about(summary: Mapping[str, Any], rows: str | None = None) -> str:
    """Model, inputs, their number and length, rows (the run's, if no others are named), norm, seed."""
    n, tokens = summary["n_items"], summary["tokens"]
    parts = [
        summary["model"],
        str(summary["task"] or summary["docs"]),
        f"n = {plural(n, summary['unit'])}",
        plural(tokens["max"], "token") if tokens["min"] == tokens["max"] else f"{tokens['min']}–{tokens['max']} tokens",
        f"rows: {rows or summary['rows']}",
        f"L{summary['settings']['p']} norm",
        f"seed {summary['seed']}",
        EXPLORATORY,
    ]
    return " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


def left_in(summary: Mapping[str, Any]) -> str:
    """Which layers were left out of all means; empty where none was."""
    excluded = summary["layers"]["excluded"]
    word = "layer" if len(excluded) == 1 else "layers"
    return f" (without {word} {', '.join(map(str, excluded))}, excluded beforehand)" if excluded else ""

"""One text as a strip: its tokens, coloured by what attention they take and what it carries."""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from kvprobe.errors import TheoryError
from kvprobe.plots.masses import _ticks as decades
from kvprobe.plots.style import GREY, WIDTH, Look, Sheet, headline, plural, sheet, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ROWS = {
    "mass": ("s", "mass s", "YlGnBu"),
    "value_mass": ("(s+ε)m", "value mass (s + ε) m", "YlGnBu"),
    "ratio": ("ρ", "ρ = Σ A m / Σ A", "YlOrBr"),
}
"""Column → name at the row, name at the colour bar, colours."""
CHARACTERS = 148
"""That a line holds."""
LEAD, AROUND, TAIL = 48, 22, 30
"""Tokens at the beginning, on either side of the evidence, and at the end, where a text is too long to show whole."""
MOST = 200
INCHES = 0.66
"""Height of one line: its text, the three rows, and the gap behind them."""


PLAIN = ("other", "pad")
"""Classes written in black."""


def _ink(bucket: str, look: Look | None) -> str:
    return "black" if look is None or bucket in PLAIN else look.colour


@dataclass(frozen=True)
class _Cell:
    """One token's place: line, left edge and width in characters."""

    row: int
    line: int
    left: float
    width: float
    text: str


@styled
def token_strip(tokens: pd.DataFrame, looks: Mapping[str, Look], summary: Mapping[str, Any], about: str) -> Sheet:
    """Every token of one input above three cells: mass s, value mass and ρ, on logarithmic colours.

    Parameters
    ----------
    tokens
        Rows of one input in the order of its text: ``position``, ``text``, ``bucket``, ``mass``, ``value_mass``,
        ``ratio``. Values that are undefined or 0 are grey.
    looks
        Bucket → how its tokens are written.
    summary
        Names ε (``epsilon``), for the note.
    about
        The subtitle.
    """
    if tokens.empty or tokens["position"].duplicated().any():
        raise TheoryError(f"a token strip needs the rows of one input, each position once; given {len(tokens)} rows")
    pieces = shown(tokens)
    cells, marks, n_lines = _placed(tokens, pieces)
    figure = sheet(WIDTH, INCHES * n_lines + 2.0)
    grid = figure.add_gridspec(2, 3, height_ratios=(INCHES * n_lines, 0.1))
    ax = figure.add_subplot(grid[0, :])
    ax.set(xlim=(-4.5, CHARACTERS), ylim=(n_lines - 0.1, -0.25))
    ax.axis("off")
    for place, (column, (short, name, colours)) in enumerate(ROWS.items()):
        image = _row(ax, tokens[column].to_numpy(float), cells, place, colours)
        bar = figure.colorbar(image, cax=figure.add_subplot(grid[1, place]), orientation="horizontal")
        bar.ax.set_title(name, fontsize=8)
        decades(bar.ax.xaxis)
        for line in range(n_lines):
            ax.text(-0.6, line + 0.36 + 0.19 * place, short, ha="right", va="center", fontsize=6, color=GREY)
    _words(ax, cells, tokens["bucket"].tolist(), looks)
    for line, left, text in marks:
        ax.text(left, line + 0.1, text, fontsize=6.5, color=GREY, va="center", style="italic")
    shown_buckets = tokens["bucket"].iloc[[cell.row for cell in cells]]
    keys = [
        Line2D([], [], linestyle="none", marker="s", color=_ink(name, look), label=look.name)
        for name, look in looks.items()
        if (shown_buckets == name).any()
    ]
    cut = f"{len(cells)} of {plural(len(tokens), 'token')} are shown. " if len(cells) < len(tokens) else ""
    note = (
        f"{cut}Text colour: position class. Means over heads and layers; s: over the rows that see the token; value "
        f"mass with ε = {summary['epsilon']:g}, ρ has none. Logarithmic colours over the whole text; grey: undefined "
        "or 0."
    )
    headline(figure, "What each token takes, and what it carries", about, note, keys, ncols=len(keys))
    return figure


def shown(tokens: pd.DataFrame) -> list[range]:
    """Rows that are drawn, as ranges: all of a short text; else its beginning, around the evidence, and its end."""
    n = len(tokens)
    if n <= MOST:
        return [range(n)]
    wanted = set(range(LEAD)) | set(range(n - TAIL, n))
    evidence = np.flatnonzero((tokens["bucket"] == "evidence").to_numpy())
    for row in evidence.tolist():
        wanted.update(range(max(row - AROUND, 0), min(row + AROUND + 1, n)))
    ordered = sorted(wanted)
    edges = [0, *(i for i in range(1, len(ordered)) if ordered[i] != ordered[i - 1] + 1), len(ordered)]
    return [range(ordered[a], ordered[b - 1] + 1) for a, b in itertools.pairwise(edges)]


def _placed(tokens: pd.DataFrame, pieces: Sequence[range]) -> tuple[list[_Cell], list[tuple[int, float, str]], int]:
    """Cells in lines of CHARACTERS, and the marks of what is left out (line, left edge, text)."""
    cells, marks, line, at, before = [], [], 0, 0.0, 0
    texts = [_readable(text) for text in tokens["text"]]
    for piece in pieces:
        if piece.start > before:
            mark = f" … {plural(piece.start - before, 'token')} … "
            line, at = (line + 1, 0.0) if at + len(mark) > CHARACTERS else (line, at)
            marks.append((line, at, mark))
            at += len(mark)
        for row in piece:
            width = max(_width(texts[row]), 2) + 0.8
            line, at = (line + 1, 0.0) if at + width > CHARACTERS else (line, at)
            cells.append(_Cell(row, line, at, width, texts[row]))
            at += width
        before = piece.stop
    return cells, marks, line + 1


def _readable(text: str) -> str:
    """A token in a cell: without the space before it; line breaks and blanks as signs, at most 18 characters."""
    plain = text.replace("\n", "↵").replace("\t", "⇥")
    plain = plain.strip(" ") or "␣"
    plain = "".join(sign if sign.isprintable() else "·" for sign in plain)
    return plain if len(plain) <= 18 else plain[:17] + "…"


def _width(text: str) -> float:
    """Characters that a text takes; those that are wide in a monospaced font, or stand for a missing one, take two."""
    return sum(2.0 if unicodedata.east_asian_width(sign) in "WF" else 1.0 for sign in text)


def _row(ax: Axes, values: np.ndarray[Any, Any], cells: Sequence[_Cell], place: int, colours: str) -> ScalarMappable:
    """One of the three rows of cells under every line."""
    usable = values[np.isfinite(values) & (values > 0)]
    low, high = (float(usable.min()), float(usable.max())) if len(usable) else (0.1, 1.0)
    norm = LogNorm(low, high if high > low * (1 + 1e-9) else low * math.e)
    boxes = [Rectangle((cell.left, cell.line + 0.27 + 0.19 * place), cell.width - 0.12, 0.17) for cell in cells]
    patches = PatchCollection(boxes, cmap=colours, norm=norm, linewidths=0)
    chosen = values[[cell.row for cell in cells]]
    patches.set_array(np.ma.masked_where(~(np.isfinite(chosen) & (chosen > 0)), chosen))
    patches.set_cmap(patches.get_cmap().with_extremes(bad="#BFBFBF"))
    ax.add_collection(patches, autolim=False)
    return patches


def _words(ax: Axes, cells: Sequence[_Cell], buckets: Sequence[str], looks: Mapping[str, Look]) -> None:
    for cell in cells:
        look = looks.get(buckets[cell.row])
        plain = look is None or buckets[cell.row] in PLAIN
        ax.text(
            cell.left,
            cell.line + 0.12,
            cell.text,
            fontsize=6.6,
            family="DejaVu Sans Mono",
            va="center",
            parse_math=False,
            color=_ink(buckets[cell.row], look),
            fontweight="normal" if plain else "bold",
        )

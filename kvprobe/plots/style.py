"""What all figures share: the sheet they are drawn on, the look of each class of spans, title and notes."""

from __future__ import annotations

import functools
import io
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

P = ParamSpec("P")
R = TypeVar("R")

DPI = 150
WIDTH = 9.8
"""Width of a figure, in inches; a file has a margin of 0.1 around it."""
GREY = "#595959"

_STYLE = {
    "font.size": 9,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.hashsalt": "kvprobe",
}


@dataclass(frozen=True)
class Look:
    """How one class of spans is named and drawn."""

    name: str
    colour: str
    marker: str
    size: float
    filled: bool = True

    def marks(self, scale: float = 1.0, n: int = 1) -> dict[str, Any]:
        """Keywords of ``Axes.plot`` for points; many of them get smaller."""
        scale *= min(1.0, (60 / max(n, 1)) ** 0.25)
        face = self.colour if self.filled else "none"
        return {
            "linestyle": "none",
            "marker": self.marker,
            "markersize": self.size * scale,
            "markerfacecolor": face,
            "markeredgecolor": self.colour,
        }


LOOKS = {
    "evidence": Look("asked needle (E)", "#D55E00", "*", 10.5),
    "hard": Look("other needle (H)", "#0072B2", "^", 7),
    "decoy": Look("decoy: planted fact", "#009E73", "s", 5.5),
    "distractor": Look("haystack text (D)", GREY, "o", 4, filled=False),
}
"""Label in the tables → look, in the order of drawing on an axis."""


def styled(function: Callable[P, R]) -> Callable[P, R]:
    """Draw under matplotlib's defaults and the house style, whatever the user's own settings are."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib.style.context(["default", _STYLE]):
            return function(*args, **kwargs)

    return wrapper


class Sheet(Figure):
    """A figure that a notebook shows by itself.

    IPython knows how to show a plain Figure only after pyplot's inline backend was set up; ``_repr_png_`` is what it
    falls back to. Where the backend is set up, its own formatter goes first, so the figure never shows twice.
    """

    @styled
    def add_subplot(self, *args: Any, **kwargs: Any) -> Any:
        """Axes in the house style, wherever they are asked for."""
        return super().add_subplot(*args, **kwargs)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
        return buffer.getvalue(), {"width": round(96 * self.get_figwidth())}  # CSS pixels: sharp, and of its true size


@styled
def sheet(width: float = WIDTH, height: float = 4.0) -> Sheet:
    """Return an empty figure of this size in inches; what is drawn on it is laid out without overlaps."""
    return Sheet(figsize=(width, height), dpi=DPI, layout="constrained")


def headline(
    figure: Figure, title: str, subtitle: str, note: str = "", handles: Sequence[Any] = (), ncols: int = 3
) -> None:
    """Title and subtitle above, legend and note below; the axes get the room between."""
    width, height = figure.get_size_inches()
    above, below = _wrapped(subtitle, width), _wrapped(note, width)
    keys = 0.2 * math.ceil(len(handles) / ncols)
    top, bottom = 0.38 + 0.16 * len(above), 0.06 + 0.16 * len(below)
    left = 0.05 / width
    text = {"x": left, "parse_math": False}  # a name may hold dollar signs
    figure.text(y=1 - 0.08 / height, s=title, fontsize=11, fontweight="bold", va="top", **text)
    figure.text(y=1 - 0.31 / height, s="\n".join(above), fontsize=8, color=GREY, va="top", **text)
    figure.text(y=0.04 / height, s="\n".join(below), fontsize=8, color=GREY, va="bottom", **text)
    if handles:
        place = {"loc": "lower left", "bbox_to_anchor": (left, bottom / height), "borderaxespad": 0.0, "borderpad": 0.2}
        figure.legend(handles=handles, ncols=ncols, fontsize=8, **place).set_in_layout(False)
    bottom += keys + 0.08
    rect = (0, bottom / height, 1, 1 - (top + bottom) / height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect, w_pad=0.1))


def _wrapped(text: str, width: float) -> list[str]:
    """Lines of 8-point text that fit into ``width`` inches; line breaks in ``text`` are kept."""
    return [line for part in text.splitlines() for line in textwrap.wrap(part, int(width * 16), break_on_hyphens=False)]


def plural(n: int, word: str) -> str:
    """``1 item``, ``2 items``."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign and a true minus: ``+0.14``, ``−17.35``."""
    return f"{value:+.{digits}f}".replace("-", "−")

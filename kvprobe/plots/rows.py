"""From a head to the spans it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from matplotlib.lines import Line2D

from kvprobe.errors import TheoryError
from kvprobe.plots.style import GREY, LOOKS, Look, headline, sheet, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Range = tuple[int, int]
Spans = Mapping[str, Range | Sequence[Range]]

FLOOR = 1e-6
"""Lowest attention that the logarithmic axis shows."""
WIDE = 0.1
"""Spans longer than this share of the keys are shaded faintly."""
_OTHERS = (("#CC79A7", "v"), ("#E69F00", "D"), ("#56B4E9", "P"), ("#0072B2", "X"), ("#009E73", "<"), ("#D55E00", ">"))


@styled
def head_spans(
    trace: Any,
    layer: int,
    head: int,
    *,
    query: int | None = None,
    spans: Spans | None = None,
    tokens: Sequence[str] | None = None,
    top: int = 10,
    log: bool = False,
    ax: Axes | None = None,
) -> Figure:
    """One head's attention over the keys of one observed query, with the named spans, and the tokens it reads most.

    Parameters
    ----------
    trace : Trace
        What :func:`kvprobe.observe` returns.
    query
        Position of an observed query; None is the last one.
    spans
        Name → (start, stop) or a list of them, such as ``item.spans``; None takes the trace's own. The names
        ``evidence``, ``hard``, ``decoy`` and ``distractor`` have a fixed look. The legend gives each name's share of
        the attention.
    tokens
        The n tokens as text (``prompt.tokens(model)``), to name what is read.
    top
        Number of keys in the list of those read most.
    log
        Logarithmic attention axis, from 1e-6: points in place of stems.
    ax
        Draw the row there, without the list of keys; None makes a figure of both.

    Raises
    ------
    TheoryError
        A layer, head or query that the trace does not have, or tokens of another number than its keys.
    """
    row, at = _row(trace, layer, head, query)
    if tokens is not None and len(tokens) != len(row):
        raise TheoryError(f"{len(tokens)} tokens were given for a trace of {len(row)} keys")
    named = {name: _ranges(given) for name, given in (trace.spans if spans is None else spans).items()}
    if ax is not None:
        _draw(ax, row, named, at, log)
        ax.set_title(f"layer {layer}, head {head}, query at {at}")
        return cast("Figure", ax.figure)
    figure = sheet(height=3.6)
    left, right = figure.subplots(1, 2, width_ratios=(3.2, 1))
    _draw(left, row, named, at, log)
    _most_read(right, row, named, tokens, top)
    model = (getattr(trace, "meta", None) or {}).get("model", "")
    asked = f"query at position {at}" + (f", token {_shown(tokens[at])}" if tokens is not None else "")
    about = f"{model} · {len(row)} keys · {asked} · attention sums to {row.sum():.3f}".lstrip(" ·")
    headline(figure, f"What layer {layer}, head {head} reads", about)
    return figure


def _row(trace: Any, layer: int, head: int, query: int | None) -> tuple[np.ndarray[Any, Any], int]:
    """Attention [n] and the position of its query."""
    at = trace.queries[-1] if query is None else query
    if at not in trace.queries:
        known = ", ".join(map(str, trace.queries[:10])) + (" …" if len(trace.queries) > 10 else "")
        raise TheoryError(f"query {query} was not observed: the trace has {known}")
    attention = trace.layer(layer).attention
    if not 0 <= head < attention.shape[0]:
        raise TheoryError(f"head {head} does not exist: layer {layer} has heads 0 … {attention.shape[0] - 1}")
    return attention[head, trace.queries.index(at)].detach().float().cpu().numpy(), int(at)


def _ranges(given: Range | Sequence[Range]) -> list[Range]:
    array = np.asarray(given, dtype=int).reshape(-1, 2)
    return [(int(start), int(stop)) for start, stop in array]


def _look(name: str, number: int) -> Look:
    return LOOKS.get(name) or Look(name, *_OTHERS[number % len(_OTHERS)], 6)


def _draw(ax: Axes, row: np.ndarray[Any, Any], named: Mapping[str, list[Range]], at: int, log: bool) -> None:
    handles = []
    for number, (name, ranges) in enumerate(named.items()):
        look = _look(name, number)
        for start, stop in ranges:
            faint = 0.07 if stop - start > WIDE * len(row) else 0.22
            ax.axvspan(start - 0.5, stop - 0.5, color=look.colour, alpha=faint, linewidth=0, zorder=0)
        middles = [(start + stop - 1) / 2 for start, stop in ranges]
        above = ax.get_xaxis_transform()
        ax.plot(middles, [1.03] * len(middles), transform=above, clip_on=False, label=name, **look.marks(0.7))
        share = sum(float(row[start:stop].sum()) for start, stop in ranges)
        handles.append(Line2D([], [], **look.marks(0.9), label=f"{look.name}: {_percent(share)}"))
    _weights(ax, row, log)
    ax.set(xlim=(-0.01 * len(row), 1.01 * len(row)), xlabel="key position (token)", ylabel="attention (share)")
    ax.axvline(at, color=GREY, linestyle=":", linewidth=0.9, zorder=1)
    handles.append(Line2D([], [], color=GREY, linestyle=":", label="the query"))
    # A distance in font sizes keeps the legend clear of the axis label, however tall the axes are.
    ax.legend(handles=handles, ncols=3, fontsize=8, loc="upper left", bbox_to_anchor=(0.0, 0.0), borderaxespad=4.2)


def _weights(ax: Axes, row: np.ndarray[Any, Any], log: bool) -> None:
    """Stems; points on the logarithmic axis, where stems of all keys would be one black area."""
    if log:
        seen = np.flatnonzero(row >= FLOOR)
        ax.plot(seen, row[seen], ".", color="black", markersize=2.5, zorder=2, label="attention")
        ax.set_yscale("log")
        ax.set_ylim(bottom=FLOOR)
    else:
        ax.vlines(np.arange(len(row)), 0.0, row, color="black", linewidth=0.9, zorder=2, label="attention")
        ax.set_ylim(bottom=0)


def _most_read(
    ax: Axes, row: np.ndarray[Any, Any], named: Mapping[str, list[Range]], tokens: Sequence[str] | None, top: int
) -> None:
    """The keys with most attention as bars, in the colour of their span."""
    best = np.argsort(-row, kind="stable")[: min(top, len(row))]
    colours = [_colour(int(key), named) for key in best]
    bars = ax.barh(range(len(best)), row[best], color=colours, edgecolor="black", linewidth=0.5)
    ax.bar_label(bars, [_percent(value) for value in row[best]], padding=2, fontsize=8)
    names = [f"{key}" if tokens is None else f"{_shown(tokens[key])}  {key}" for key in best]
    ax.set_yticks(range(len(best)), names, parse_math=False, fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.3)
    ax.set(xlabel="attention (share)", title="read most: " + ("position" if tokens is None else "token, position"))


def _colour(key: int, named: Mapping[str, list[Range]]) -> str:
    """Colour of the shortest named span around a key."""
    around = [
        (stop - start, _look(name, number).colour)
        for number, (name, ranges) in enumerate(named.items())
        for start, stop in ranges
        if start <= key < stop
    ]
    return min(around)[1] if around else "white"


def _percent(share: float) -> str:
    return "< 0.1%" if 0 < share < 0.001 else f"{share:.1%}"


def _shown(token: str) -> str:
    text = repr(token)
    return text if len(text) <= 16 else text[:14] + "…'"

"""What all commands share: the console, the progress bar, how an interval is written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


def console() -> Any:
    """A terminal's own width; 120 columns where the output is piped, so that tables keep their words whole."""
    from rich.console import Console

    found = Console(soft_wrap=True, markup=False, highlight=False)
    return found if found.is_terminal else Console(width=120, soft_wrap=True, markup=False, highlight=False)


def progress(what: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """A bar over ``items`` or ``documents`` on a terminal, nothing elsewhere."""

    def bar(things: Iterable[Any]) -> Iterable[Any]:
        from tqdm import tqdm

        return tqdm(things, desc=what, unit=what.removesuffix("s"), disable=not sys.stderr.isatty())

    return bar


def per_cent(share: float) -> str:
    """``20 %``, ``2.5 %``."""
    return f"{100 * share:.3g} %"


def plural(n: int, word: str) -> str:
    """``1 item``, ``2 items``."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def documents_line(summary: dict[str, Any]) -> str:
    """How many documents, of what length, and which."""
    n, tokens = summary["n_docs"], summary["tokens"]
    cut = f", {summary['truncated']} truncated" if summary["truncated"] else ""
    return (
        f"{n} document{'s' if n != 1 else ''} of {tokens['min']}–{tokens['max']} tokens{cut} ({summary['docs']}), "
        f"probe {summary['probe']}"
    )


def interval(row: dict[str, Any]) -> str:
    """``[low, high]`` of a row with ``ci_low`` and ``ci_high``."""
    low, high = row["ci_low"], row["ci_high"]
    return "[no interval]" if low is None or low != low else f"[{low:.3g}, {high:.3g}]"


def written(out: Path) -> str:
    """The files of a finished run, on one line."""
    return "written: " + ", ".join(str(path) for path in sorted(out.iterdir()) if not path.name.startswith("."))


def table_of(title: str, columns: Sequence[str], left: int = 1, caption: str | None = None) -> Any:
    """An empty table for the console; the first ``left`` columns hold text, the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < left else "right", no_wrap=True)
    return table

"""What all commands share: the console, the progress bar, how an interval is written."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def console() -> Any:
    """A terminal's own width; 120 columns where the output is piped, so that tables keep their words whole."""
    from rich.console import Console

    found = Console(soft_wrap=True, markup=False, highlight=False)
    return found if found.is_terminal else Console(width=120, soft_wrap=True, markup=False, highlight=False)


def progress(items: Iterable[int]) -> Iterable[int]:
    """A bar over items on a terminal, nothing elsewhere."""
    from tqdm import tqdm

    return tqdm(items, desc="items", unit="item", disable=not sys.stderr.isatty())


def interval(row: dict[str, Any]) -> str:
    """``[low, high]`` of a row with ``ci_low`` and ``ci_high``."""
    low, high = row["ci_low"], row["ci_high"]
    return "[no interval]" if low is None or low != low else f"[{low:.3g}, {high:.3g}]"


def written(out: Path) -> str:
    """The files of a finished run, on one line."""
    return "written: " + ", ".join(str(path) for path in sorted(out.iterdir()) if not path.name.startswith("."))

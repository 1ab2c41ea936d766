"""What every figure over documents says of its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvprobe.plots.style import plural


def about(summary: Mapping[str, Any]) -> str:
    """Model, documents, their lengths, probe and norm."""
    tokens, cut = summary["tokens"], summary["truncated"]
    return (
        f"{summary['model']}, {plural(summary['n_docs'], 'document')} ({summary['docs']}) of {tokens['min']}–"
        f"{tokens['max']} tokens{f', {cut} cut' if cut else ''}, probe {summary['probe']}, L{summary['norm']} norm"
    )


def over(summary: Mapping[str, Any]) -> str:
    """What intervals are over."""
    n = summary["n_docs"]
    return f"95 % over {n} documents" if n > 1 else "none, of one document"


def per_cent(share: float) -> str:
    """``20 %``, ``2.5 %``."""
    return f"{100 * share:.3g} %"

"""Combinations of scorer, budget and selector that make no sense, each with the reason."""

from __future__ import annotations

from typing import Any

from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.budgets.base import Budget
from kvprobe.eviction.scorers.base import Scorer
from kvprobe.eviction.selectors import Selector


def refuse(scorer: Any, budget: Any, selector: Any, granularity: str) -> None:
    """Raise :class:`EvictionError` where a part is none, or the parts contradict each other."""
    for part, kind in ((scorer, Scorer), (budget, Budget), (selector, Selector)):
        if not isinstance(part, kind):
            raise EvictionError(
                f"{quote(part)} is no {kind.__name__.lower()}; allowed: an object made from {kind.__name__}"
            )
    if reason := _reason(scorer, budget, selector, granularity):
        raise EvictionError(reason)


def _reason(scorer: Scorer, budget: Budget, selector: Selector, granularity: str) -> str | None:
    if selector.needs_attention and not scorer.attention:
        return (
            f"{scorer.name} has no first stage for {selector.name}: its scores are not attention (a negative or "
            "arbitrary score times a value norm inverts or scrambles the value term); allowed: topk"
        )
    if selector.needs_attention and scorer.value_aware:
        return f"{scorer.name} already contains the values: {selector.name} would count them twice; allowed: topk"
    if selector.needs_heads and not scorer.rows(1 << 30):
        return f"{selector.name} with this value term needs query rows, and {scorer.name} looks at none"
    if budget.needs_attention and not scorer.attention:
        return (
            f"{budget.name} compares scores between heads, and those of {scorer.name} are not attention masses; "
            "allowed: uniform, pyramid, headkv"
        )
    if budget.name == "duo" and scorer.name != "streaming":
        return f"duo's heads hold sinks and recent tokens, or everything; allowed: streaming (given {scorer.name})"
    if budget.name == "duo" and getattr(scorer, "sinks", None) != getattr(budget, "sinks", None):
        return (
            f"duo's streaming heads hold {getattr(budget, 'sinks', None)} sinks and the scorer protects "
            f"{getattr(scorer, 'sinks', None)}; allowed: a scorer and a budget of the same sinks"
        )
    if granularity == "query_head" and (budget.name == "duo" or scorer.kv_heads_only):
        what = "duo's gates" if budget.name == "duo" else f"{scorer.name}'s scores"
        return f"{what} belong to kv heads; allowed: granularity='kv_head'"
    return None

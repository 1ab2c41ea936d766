"""What a policy cannot do with contexts of a given size, found out before anything is computed."""

from __future__ import annotations

from typing import Any

from kvprobe import inputs
from kvprobe.curves.settings import Settings
from kvprobe.eviction.live import check as check_live
from kvprobe.eviction.policies import ratio
from kvprobe.eviction.rehearsal import rehearse
from kvprobe.tasks.items import Item


def refuse(model: Any, settings: Settings, items: list[Item]) -> None:
    """Refuse what does not fit the items of a run; only their lengths and the policies' own rules are looked at.

    Budgets shrink with the share, the context and the first chunk of it, so the smallest of each decides.
    """
    n = min(compressed(settings, item) for item in items)
    seen = n if settings.chunk is None else min(n, settings.chunk)
    cache = min(settings.caches, key=ratio)
    if settings.chunk is not None:
        for policy in settings.policies:
            check_live(policy)
    rehearse(model, settings.policies, seen, cache, "" if settings.chunk is None else ", first chunk")
    for item in items:
        answer = len(item.answer_ids)
        inputs.check_length(model, len(item.prompt) - item.prompt.pad + max(answer, written(settings, answer)))


def compressed(settings: Settings, item: Item) -> int:
    """Number of tokens of an item that are compressed."""
    stop = item.context_stop if settings.setting == "context" else len(item.prompt)
    return stop - item.prompt.pad


def written(settings: Settings, answer: int) -> int:
    """Number of tokens decoded greedily, given the gold answer's length."""
    return answer + 8 if settings.new_tokens is None else settings.new_tokens

"""What a policy cannot do with contexts of a given size, found out before anything is computed."""

from __future__ import annotations

from typing import Any

import torch

from kvprobe import inputs
from kvprobe.curves.settings import Settings
from kvprobe.errors import EvictionError, TaskError
from kvprobe.eviction import Layer, Policy, Scored, entries
from kvprobe.eviction.live import check as check_live
from kvprobe.eviction.measuring import check as check_context
from kvprobe.eviction.policies import ratio
from kvprobe.tasks.items import Item
from kvprobe.twopart import LayerSpec


def refuse(model: Any, settings: Settings, items: list[Item]) -> None:
    """Refuse what does not fit the items of a run; only their lengths and the policies' own rules are looked at.

    Budgets shrink with the share, the context and the first chunk of it, so the smallest of each decides.
    """
    n = min(compressed(settings, item) for item in items)
    seen = n if settings.chunk is None else min(n, settings.chunk)
    cache = min(settings.caches, key=ratio)
    check_context(model, settings.policies, seen, future=1)
    if settings.chunk is not None:
        for policy in settings.policies:
            check_live(policy)
    if entries(seen, cache) < 1:
        raise TaskError(f"cache {cache} of {seen} tokens is no entry at all, must be at least {1 / seen:.4g}")
    for policy in settings.policies:
        _fits(policy, [_blank(model, policy, index, seen) for index in range(model.geometry.n_layers)], cache, settings)
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


def _fits(policy: Policy, scored: list[Scored], cache: str, settings: Settings) -> None:
    """Let the policy choose from a context that is all alike: what it refuses there, it refuses by size alone."""
    try:
        policy.choose(scored, cache)
    except EvictionError as error:
        where = f"cache {cache}" if settings.chunk is None else f"cache {cache}, first chunk"
        raise EvictionError(f"{where}: {error}") from None


def _blank(model: Any, policy: Policy, index: int, n: int) -> Scored:
    """A layer of n entries without content; its tensors are one number each, expanded."""
    geometry, zero = model.geometry, torch.zeros(1)
    heads, kv_heads, rows = geometry.n_heads, geometry.n_kv_heads, max(policy.scorer.rows(n), 1)
    layer = Layer(
        index,
        geometry.n_layers,
        zero.expand(kv_heads, n, 1),
        zero.expand(kv_heads, n, 1),
        zero.expand(heads, 1, 1),
        zero.expand(heads, rows, 1),
        LayerSpec(scale=1.0),
        torch.arange(n).expand(kv_heads, -1),
        n,
        granularity=policy.granularity,
        seed=policy.seed,
    )
    per_head = zero.expand(heads, n)
    return Scored(layer, torch.zeros(layer.n_sets, n), per_head, per_head + 1 / n)

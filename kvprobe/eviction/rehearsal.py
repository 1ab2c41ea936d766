"""What a policy refuses of contexts of a given size, found out before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvprobe.errors import EvictionError
from kvprobe.eviction.layer import Layer
from kvprobe.eviction.measuring import check
from kvprobe.eviction.policies import Policy, entries
from kvprobe.eviction.selectors import Scored
from kvprobe.twopart import LayerSpec


def rehearse(model: Any, policies: Sequence[Policy], n: int, cache: str, where: str = "", future: int = 1) -> None:
    """Let every policy choose from a context of ``n`` tokens that are all alike.

    What a policy refuses there, it refuses by size alone; so the smallest context and the smallest share of a run
    decide for all. ``future`` is the number of tokens behind the context that are known beforehand.

    Raises
    ------
    EvictionError
        The policy's own reason, after the cache share and ``where``.
    """
    check(model, policies, n, future)
    if entries(n, cache) < 1:
        raise EvictionError(f"cache {cache} of {n} tokens is no entry at all; allowed: at least {1 / n:.4g}")
    for policy in policies:
        try:
            policy.choose([_blank(model, policy, index, n) for index in range(model.geometry.n_layers)], cache)
        except EvictionError as error:
            raise EvictionError(f"cache {cache}{where}: {error}") from None


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

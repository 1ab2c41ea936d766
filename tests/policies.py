"""Every sensible policy, small enough for tiny models: the rows of the shared law table."""

from dataclasses import replace

import torch

from kvprobe import eviction
from kvprobe.errors import EvictionError
from kvprobe.eviction import SCORERS, Scorer

SMALL = {"window": 4, "pool": "max", "kernel": 3}
IMPORTANCE = [[float(1 + (3 * layer + head) % 5) for head in range(6)] for layer in range(3)]
GATES = [[0.1, 0.9], [0.5, 0.2], [0.8, 0.3]]


class LastRow(Scorer):
    """A third party's scorer, as small as one can be."""

    name = "last_row"

    def rows(self, n):
        return 1

    def score(self, layer):
        return layer.mean_attention(1)


def all_policies():
    """Name → policy."""
    small = [eviction.policy(name, **SMALL) for name in ("snapkv", "snapkv+two_stage", "adakv", "adakv+two_stage")]
    small += [
        eviction.policy("snapkv+two_stage", group="bound", **SMALL),
        eviction.policy("snapkv+adakv+two_stage", centred=2, **SMALL),
        eviction.policy("snapkv+layer_global", **SMALL),
        eviction.policy("snapkv+layer_global+two_stage", scope="model", p=2, **SMALL),
        eviction.policy("pyramid+two_stage", beta=3, **SMALL),
        eviction.policy("headkv", importance=IMPORTANCE, **SMALL),
        eviction.policy("duo", gates=GATES, sinks=2, recent=6),
        eviction.policy("h2o"),
        eviction.policy("h2o+adakv+two_stage", norm="queries_seen"),
        eviction.policy("h2o_256", window=8),
        eviction.policy("tova"),
        eviction.policy("tova+two_stage"),
        eviction.policy("streaming"),
        eviction.policy("streaming+pyramid", beta=3),
        eviction.policy("knorm"),
        eviction.policy("expected_attention", n_future=16),
        eviction.policy("expected_attention+adakv", n_future=16, epsilon=1e-2),
        eviction.policy("expected_attention+two_stage", n_future=16, vnorm=False),
        eviction.policy("defensivekv", window=4),
        eviction.policy("obcache", window=4),
        eviction.policy("random", seed=5),
        eviction.policy("oracle"),
        eviction.policy("oracle+adakv+two_stage"),
        eviction.policy(LastRow()),
        eviction.policy(LastRow(), budget="adakv", selector="two_stage"),
    ]
    every = {f"{number}-{each.name}": each for number, each in enumerate(small)}
    assert {each.scorer.name for each in small} == {*SCORERS, "last_row"}
    return every


def at_query_heads(policy):
    """The same policy with a kept set a query head, or None where that is refused."""
    try:
        return replace(policy, granularity="query_head")
    except EvictionError:
        return None


def future_of(policy):
    return [7, 8, 9] if policy.scorer.needs_future else None


def protected_of(policy, scored, choice):
    base = int(choice.budgets.sum()) // choice.budgets.numel()
    held = torch.full_like(choice.budgets, base) if policy.scorer.protects_once else choice.budgets
    return torch.stack(
        [
            policy.scorer.protected(each.layer, budgets) & (each.scores > -torch.inf)
            for each, budgets in zip(scored, held, strict=True)
        ]
    )

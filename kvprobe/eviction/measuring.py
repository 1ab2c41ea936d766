"""measure(): one prefill, and what any number of scorers see on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvprobe import engine, inputs
from kvprobe.engine import Prefix
from kvprobe.errors import EvictionError, PromptError, quote
from kvprobe.eviction.layer import Layer
from kvprobe.eviction.policies import Policy
from kvprobe.eviction.selectors import Scored
from kvprobe.rotary import Rotary
from kvprobe.twopart import LayerSpec

KEPT_ROWS = 512
"""Query rows that outlive the prefill where a scorer asked for those of all tokens; a window stays whole."""


@dataclass(frozen=True)
class Measured:
    """A prefilled context and what each policy's scorer saw of it.

    Attributes
    ----------
    prefix
        The context, exact: hand it to :func:`kvprobe.intervene`.
    seen
        (scorer, granularity, seed, whether heads are kept) → one :class:`Scored` a layer; policies that differ only in
        budget or selector share them.
    """

    prefix: Prefix
    seen: dict[Any, list[Scored]] = field(repr=False)

    def scored(self, policy: Policy) -> list[Scored]:
        """What this policy's scorer saw, layer by layer."""
        if not isinstance(policy, Policy):
            raise EvictionError(f"{quote(policy)} is no policy; allowed: what kvprobe.eviction.policy(…) returns")
        if _key(policy) not in self.seen:
            raise EvictionError(
                f"{policy.name} was not among the policies measured; allowed: those given to measure(…)"
            )
        return self.seen[_key(policy)]


def measure(model: Any, context: Any, policies: Sequence[Policy], *, future: Any = None) -> Measured:
    """Prefill a context once and let every policy's scorer look at each layer as it passes.

    Parameters
    ----------
    model
        A loaded model.
    context
        Token ids, or a Prompt.
    policies
        Policies whose scores are wanted.
    future
        Token ids after the context, for the oracle: they are run too, but are no part of the cache.

    Raises
    ------
    EvictionError
        The context is too short for a scorer, or one needs what was not given.
    """
    if not isinstance(policies, (list, tuple)):
        raise EvictionError(f"policies={quote(policies)}; allowed: a list of policies")
    ids = context_ids(model, context)
    later = inputs.continuation(model, future)
    check(model, policies, len(ids), len(later))
    inputs.check_length(model, len(ids) + len(later))
    watch = Watch(model, policies, len(ids), len(later))
    whole, _ = engine.prefill(model.twin, torch.cat([ids, later.to(ids.device)]), observer=watch)
    prefix = whole if not len(later) else whole.upto(len(ids))
    return Measured(prefix, {key: _on(prefix, seen) for key, seen in watch.seen.items()})


def _on(prefix: Prefix, seen: Sequence[Scored]) -> list[Scored]:
    """The same layers, reading the cache's own tensors, so that those of the pass can be freed."""
    pairs = zip(seen, prefix.layers, strict=True)
    return [replace(each, layer=replace(each.layer, keys=keys, values=values)) for each, (keys, values) in pairs]


def context_ids(model: Any, context: Any) -> Tensor:
    """Real token ids of a Prompt or of bare ids."""
    if not hasattr(model, "twin"):
        raise EvictionError(f"{quote(model)} is not a loaded model; allowed: what kvprobe.load(…) returns")
    if hasattr(context, "ids"):
        return inputs.real_ids(model, context)
    try:
        ids = inputs.continuation(model, context)
    except PromptError as error:
        raise EvictionError(f"{quote(context)} is no context; allowed: token ids or a Prompt") from error
    if not len(ids):
        raise EvictionError("the context is empty; allowed: one token or more")
    return ids


def check(model: Any, policies: Sequence[Policy], n: int, future: int) -> None:
    """Refuse what a policy cannot do with this context, before anything is run."""
    for policy in policies:
        if not isinstance(policy, Policy):
            raise EvictionError(f"{quote(policy)} is no policy; allowed: what kvprobe.eviction.policy(…) returns")
        if policy.scorer.rows(n) > n:
            raise EvictionError(
                f"{policy.name} looks at the last {policy.scorer.rows(n)} queries and the context has {n} tokens; "
                "allowed: a smaller window or a longer context"
            )
        if policy.scorer.needs_future and not future:
            raise EvictionError(
                f"{policy.name} looks at the tokens after the context; allowed: future=… with one or more"
            )


def _key(policy: Policy) -> Any:
    scorer: Any = policy.scorer
    try:
        hash(scorer)
    except TypeError:  # a third party's scorer may hold tensors: the same object then, not an equal one
        scorer = id(scorer)
    return scorer, policy.granularity, policy.seed, policy.selector.needs_heads


class Watch:
    """The observer of one prefill: builds a :class:`Layer` and lets each distinct scorer look at it."""

    def __init__(self, model: Any, policies: Sequence[Policy], n: int, future: int) -> None:
        self.model, self.n, self.future = model, n, future
        self.policies = {_key(policy): policy for policy in policies}
        self.rotary = Rotary.of(model) if any(p.scorer.needs_rotary for p in policies) else None
        self.seen: dict[Any, list[Scored]] = {key: [] for key in self.policies}
        self.positions: Tensor | None = None

    def __call__(self, index: int, query: Tensor, key: Tensor, value: Tensor, spec: LayerSpec) -> None:
        """Take one layer's tensors [1, ·, n, d] as the attention is about to use them."""
        norms: dict[Any, Tensor] = {}
        for name, policy in self.policies.items():
            layer = self._layer(policy, index, query, key, value, spec)
            scored = policy.score(layer)
            rows = layer.queries.shape[1]
            kept = rows if rows < self.n else min(rows, KEPT_ROWS)
            slim = replace(layer, queries=layer.queries[:, rows - kept :].clone(), future=None)
            self.seen[name].append(replace(scored, layer=slim, _norms=norms))

    def _layer(self, policy: Policy, index: int, query: Tensor, key: Tensor, value: Tensor, spec: LayerSpec) -> Layer:
        n, rows = self.n, policy.scorer.rows(self.n)
        if self.positions is None or self.positions.device != key.device:
            self.positions = torch.arange(n, device=key.device).expand(key.shape[1], -1)
        return Layer(
            index,
            self.model.geometry.n_layers,
            key[0, :, :n],
            value[0, :, :n],
            self.model.w_o(index),
            query[0, :, n - rows : n],
            spec,
            self.positions,
            n,
            query[0, :, n:] if policy.scorer.needs_future else None,
            self.rotary if policy.scorer.needs_rotary else None,
            policy.granularity,
            policy.seed,
            untouched=True,
        )

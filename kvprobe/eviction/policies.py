"""A policy: scorer × budget × selector, and what it keeps of a context."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.budgets.base import Allocation, Budget, Request
from kvprobe.eviction.budgets.uniform import Uniform
from kvprobe.eviction.layer import Granularity, Layer
from kvprobe.eviction.rules import refuse
from kvprobe.eviction.scorers.base import Scorer
from kvprobe.eviction.selectors import Scored, Selector, TopK, TwoStage

GRANULARITIES = ("kv_head", "query_head")
EXPONENT = re.compile(r"[eE][-+]?\d{3,}")


@dataclass(frozen=True)
class Choice:
    """What a policy keeps of one context.

    Attributes
    ----------
    keep
        Boolean [L, J, n].
    budgets
        [L, J]: exactly the entries kept.
    notes
        Facts that belong in every result (``fallback`` of PyramidKV, …).
    """

    keep: Bool[Tensor, "L J n"]
    budgets: Tensor
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Kept entries over all entries."""
        return float(self.keep.float().mean())


@dataclass(frozen=True)
class Policy:
    """An eviction policy (see :func:`policy`, which makes one from names).

    Attributes
    ----------
    scorer, budget, selector
        What is important, how many entries each head holds, how they are chosen.
    granularity
        ``"kv_head"`` (what a cache can do) or ``"query_head"`` (what a mask can do).
    seed
        For the random scorer.
    label
        Another name for tables, where two policies differ in settings only.
    """

    scorer: Scorer
    budget: Budget = field(default_factory=Uniform)
    selector: Selector = field(default_factory=TopK)
    granularity: Granularity = "kv_head"
    seed: int = 0
    label: str | None = None

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise EvictionError(f"granularity={quote(self.granularity)}; allowed: {', '.join(GRANULARITIES)}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise EvictionError(f"seed={quote(self.seed)}; allowed: a whole number")
        if self.label is not None and not (isinstance(self.label, str) and self.label.strip()):
            raise EvictionError(f"label={quote(self.label)}; allowed: a text, or None")
        refuse(self.scorer, self.budget, self.selector, self.granularity)

    @property
    def name(self) -> str:
        """The names of its parts; ``topk`` and the budget that the scorer is published with go without saying."""
        if self.label is not None:
            return self.label
        parts = [self.scorer.name]
        parts += [self.budget.name] if self.budget.name != self.scorer.default_budget else []
        parts += [self.selector.name] if self.selector.name != "topk" else []
        return "+".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Every setting, for tables and manifests."""
        parts: dict[str, Any] = {"scorer": self.scorer, "budget": self.budget, "selector": self.selector}
        described = {kind: {"name": part.name} | _settings(part) for kind, part in parts.items()}
        return {"name": self.name, **described, "granularity": self.granularity, "seed": self.seed}

    def select(self, model: Any, prompt_ids: Any, cache_ratio: Any, *, future: Any = None) -> Bool[Tensor, "L J n"]:
        """Prefill a context and choose what stays of it.

        Parameters
        ----------
        model
            A loaded model.
        prompt_ids
            Token ids of the context, or a Prompt (left pads are not part of the cache).
        cache_ratio
            The share to keep, in (0, 1]: ⌊n · cache_ratio⌋ entries a head on average, exactly.
        future
            Token ids that follow the context; only the oracle looks at them.

        Returns
        -------
        Bool[Tensor, "L J n"]
            True where the entry stays.

        Raises
        ------
        EvictionError
            The context is too short for the policy, or the ratio leaves less than it must keep.
        """
        from kvprobe.eviction.measuring import measure

        return self.choose(measure(model, prompt_ids, [self], future=future).scored(self), cache_ratio).keep

    def choose(self, scored: Sequence[Scored], cache_ratio: Any, base: int | None = None) -> Choice:
        """Budgets and kept sets of all layers, from what the scorer saw.

        ``base`` entries a head on average, by default ⌊length · cache_ratio⌋.
        """
        if not scored:
            raise EvictionError("no layer was scored; allowed: what measure(…).scored(policy) returns")
        length = scored[0].layer.length
        if base is None:
            base = entries(length, cache_ratio)
        elif not 0 < base <= length:
            raise EvictionError(f"base={quote(base)} entries of {length}; allowed: 1 … {length}")
        else:
            cache_ratio = Fraction(base, length)
        keep, shared = self.sets(scored, cache_ratio, base)
        return Choice(together(keep), shared.budgets, shared.notes)

    def sets(self, scored: Sequence[Scored], cache_ratio: Any, base: int) -> tuple[list[Tensor], Allocation]:
        """Kept sets [J, n] layer by layer (n differs where layers were evicted before), and their budgets."""
        places, shared = self._places(scored, cache_ratio, base)
        return [self.selector.select(*place, shared.at_least) for place in places], shared

    def first_stage(self, scored: Sequence[Scored], cache_ratio: Any, alpha: float | None = None) -> Tensor:
        """N′ of Algorithm 1 at this policy's budgets: the best ⌊αb⌋ entries by score, window included, [L, J, n].

        ``alpha`` is by default the selector's own, or 0.5 where it has none: what a second stage would have begun with.
        """
        selector = self.selector if isinstance(self.selector, TwoStage) else TwoStage()
        selector = selector if alpha is None else replace(selector, alpha=alpha)
        base = entries(scored[0].layer.length, cache_ratio)
        places, shared = self._places(scored, cache_ratio, base)
        return together([selector.first(*place, shared.at_least) for place in places])

    def _places(
        self, scored: Sequence[Scored], cache_ratio: Any, base: int
    ) -> tuple[list[tuple[Scored, Tensor, Tensor]], Allocation]:
        """What a selector needs of every layer: (scored, budgets, protected); and all budgets."""
        first = scored[0].layer
        reserved = [
            self._protected(each, torch.full((first.n_sets,), base, device=each.scores.device)) for each in scored
        ]
        self._fits(base, first.length, reserved)
        device = scored[0].scores.device  # budgets are shared over layers, which may lie on several
        scores, held = ([each.to(device) for each in parts] for parts in ([one.scores for one in scored], reserved))
        shared = self.budget.allocate(
            Request(base, first.length, cache_ratio, scores, held, first.n_heads // first.n_sets)
        )
        places = []
        for each, budgets, before in zip(scored, shared.budgets, reserved, strict=True):
            mine = budgets.to(each.scores.device)
            protected = before if self.scorer.protects_once else self._protected(each, mine)
            places.append((each, mine, protected))
        return places, shared

    def score(self, layer: Layer) -> Scored:
        """Let the scorer look at one layer."""
        raw = self.scorer.score(layer)
        scores = layer.per_set(raw.float())
        if bool(scores.sum().isnan()):
            raise EvictionError(f"{self.scorer.name} gave NaN on layer {layer.index}; allowed: finite scores")
        if layer.ragged:
            alive = layer.alive if layer.n_sets == layer.n_kv_heads else layer.alive.repeat_interleave(layer.group, 0)
            scores = scores.masked_fill(~alive, -torch.inf)
        if not self.selector.needs_heads:
            return Scored(layer, scores)
        heads = self.scorer.score(layer.at_query_heads()).float()
        if heads.shape[0] != layer.n_heads:
            heads = heads.repeat_interleave(layer.group, 0)
        return Scored(layer, scores, heads, layer.mean_attention(layer.queries.shape[1]))

    def _protected(self, scored: Scored, budgets: Tensor) -> Tensor:
        """What the scorer keeps whatever its score, of the entries that are there."""
        return self.scorer.protected(scored.layer, budgets) & (scored.scores > -torch.inf)

    def _fits(self, base: int, length: int, reserved: Sequence[Tensor]) -> None:
        most = max(int(each.sum(-1).max()) for each in reserved)
        if self.budget.shares_base and base < max(most, 1):
            raise EvictionError(
                f"{base} of {length} entries are fewer than the {max(most, 1)} that {self.name} always keeps; "
                f"allowed: a cache ratio of at least {max(most, 1) / length:.4g}"
            )


def together(layers: Sequence[Tensor]) -> Tensor:
    """Layers stacked where the first is: a model may lie on several devices."""
    return torch.stack([each.to(layers[0].device) for each in layers])


def entries(n: int, cache_ratio: Any) -> int:
    """⌊n · cache_ratio⌋, exactly: 0.1 means one tenth (float products would lose an entry here and there)."""
    return int(ratio(cache_ratio) * n)


def ratio(cache_ratio: Any) -> Fraction:
    """A share to keep, 0 < share ≤ 1, exactly as it is written: a number, a Fraction, or text such as 0.1 or 1/10."""
    text = str(cache_ratio).strip()
    try:
        # An exponent without end (1e-999999999) would be written out in full before it could be compared.
        share = Fraction(0) if EXPONENT.search(text) else Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if isinstance(cache_ratio, bool) or not 0 < share <= 1:
        raise EvictionError(f"cache ratio {quote(cache_ratio)}; allowed: a share to keep, 0 < ratio ≤ 1")
    return share


def _settings(part: Any) -> dict[str, Any]:
    """The settings of one part as plain values; tensors by their shape (a profile is stored beside the result)."""
    values = {each.name: getattr(part, each.name) for each in fields(part)}
    return {
        name: f"tensor {list(value.shape)}" if isinstance(value, Tensor) else value for name, value in values.items()
    }

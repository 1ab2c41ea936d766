"""Selectors: from scores and budgets to kept sets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.layer import Layer
from kvprobe_kernels import projected_norm, two_stage_select

GROUPS = ("mean_of_means", "bound")


@dataclass(frozen=True)
class Scored:
    """One layer after its scorer has looked at it: what a selector needs.

    Attributes
    ----------
    layer
        Keys and values; its query rows are those that the scorer asked for.
    scores
        [J, n] with −∞ on pads.
    per_head
        The same scores per query head, [H, n], or None where the scorer knows kv heads only or nobody needs them.
    attention
        Mean attention of the scorer's query rows per query head, [H, n], or None where nobody needs it.
    """

    layer: Layer
    scores: Float[Tensor, "J n"]
    per_head: Float[Tensor, "H n"] | None = None
    attention: Float[Tensor, "H n"] | None = None
    _norms: dict[Any, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def norms(self, p: int) -> Float[Tensor, "J n"]:
        """m_i = ‖V_i W_O‖_p, averaged over the query heads of a kept set; worked out once."""
        group = "mean" if self.layer.granularity == "kv_head" else "none"
        if (p, group) not in self._norms:
            self._norms[p, group] = projected_norm(self.layer.values, self.layer.w_o, p, group)
        return self._norms[p, group]


@dataclass(frozen=True)
class Selector:
    """Base of all selectors."""

    name: ClassVar[str] = ""
    needs_attention: ClassVar[bool] = False

    @property
    def needs_heads(self) -> bool:
        """Whether ``Scored.per_head`` and ``Scored.attention`` are looked at."""
        return False

    def select(
        self, scored: Scored, budgets: Int[Tensor, " J"], protected: Bool[Tensor, "J n"], at_least: int
    ) -> Bool[Tensor, "J n"]:
        """Kept sets of exactly ``budgets`` entries that hold all ``protected`` ones."""
        raise NotImplementedError


@dataclass(frozen=True)
class TopK(Selector):
    """The best scores, order (−score, position)."""

    name: ClassVar[str] = "topk"

    def select(
        self, scored: Scored, budgets: Int[Tensor, " J"], protected: Bool[Tensor, "J n"], at_least: int
    ) -> Bool[Tensor, "J n"]:
        """See :class:`Selector`."""
        return two_stage_select(scored.scores, None, budgets, protected=protected)


@dataclass(frozen=True)
class TwoStage(Selector):
    """CriticalKV's Algorithm 1: attention first, then attention times projected value norm.

    Stage 1 keeps the top ⌊αb⌋ of S, protected entries included; stage 2 fills the set to b by the top of the value
    term among the rest (Feng et al., arXiv 2502.03805; α = 0.5, ε = 1e-4 as in its experiments).

    Attributes
    ----------
    alpha, epsilon, p
        First-stage share; what keeps a value from vanishing beside no attention; the norm.
    group
        The value term of a kv head: ``"mean_of_means"`` (S + ε)·m of two group means, as released; ``"bound"``
        Σ_g (2 − 1/σ_g)₊ (S_g + ε) m_g, the term of Theorem 3.5 itself, σ_g the stage-1 mass of query head g's mean
        attention row (the coefficient is 0 where σ_g ≤ ½).
    centred
        Use (S_g + ε)·‖o′_g − 𝒱_i‖ instead, the term of the centred bound (derived for kvprobe): o′ is the output of
        what is kept, iterated ``centred`` times from the top-k set, so that adding one vector to all values changes
        nothing; 0 for the published term.
    """

    name: ClassVar[str] = "two_stage"
    needs_attention: ClassVar[bool] = True

    alpha: float = 0.5
    epsilon: float = 1e-4
    p: int = 1
    group: Literal["mean_of_means", "bound"] = "mean_of_means"
    centred: int = 0

    def __post_init__(self) -> None:
        if not (_number(self.alpha) and 0 <= self.alpha <= 1):
            raise EvictionError(f"alpha={quote(self.alpha)}; allowed: a share between 0 and 1")
        if not (_number(self.epsilon) and 0 <= self.epsilon < float("inf")):
            raise EvictionError(f"epsilon={quote(self.epsilon)}; allowed: a number ≥ 0")
        if isinstance(self.p, bool) or self.p not in (1, 2):
            raise EvictionError(f"p={quote(self.p)}; allowed: 1, 2")
        if self.group not in GROUPS:
            raise EvictionError(f"group={quote(self.group)}; allowed: {', '.join(GROUPS)}")
        if isinstance(self.centred, bool) or not isinstance(self.centred, int) or self.centred < 0:
            raise EvictionError(f"centred={quote(self.centred)}; allowed: a number of iterations ≥ 0")
        if self.centred and self.group == "bound":
            raise EvictionError("group='bound' and centred are two different value terms; allowed: one of them")

    @property
    def needs_heads(self) -> bool:
        """See :class:`Selector`."""
        return bool(self.centred) or self.group == "bound"

    def select(
        self, scored: Scored, budgets: Int[Tensor, " J"], protected: Bool[Tensor, "J n"], at_least: int
    ) -> Bool[Tensor, "J n"]:
        """See :class:`Selector`."""
        if self.group == "mean_of_means" and not self.centred:
            return self._fused(scored, budgets, protected, at_least)
        stage1 = self.first(scored, budgets, protected, at_least)
        if self.group == "bound":
            return _fill(scored, _bound_terms(scored, stage1, self.epsilon, self.p), budgets, stage1)
        keep = two_stage_select(scored.scores, None, budgets, protected=protected)
        for _ in range(self.centred):
            keep = _fill(scored, _centred_terms(scored, keep, self.epsilon, self.p), budgets, stage1)
        return keep

    def _fused(self, scored: Scored, budgets: Tensor, protected: Tensor, at_least: int) -> Tensor:
        return two_stage_select(
            scored.scores, scored.norms(self.p), budgets, self.alpha, self.epsilon, protected, at_least=at_least
        )

    def first(
        self, scored: Scored, budgets: Int[Tensor, " J"], protected: Bool[Tensor, "J n"], at_least: int
    ) -> Bool[Tensor, "J n"]:
        """The first stage alone, N′: ⌊αb⌋ entries, the protected included."""
        share = torch.tensor([stage1_places(self.alpha, int(b), at_least) for b in budgets.tolist()])
        places = torch.maximum(share.to(budgets.device), protected.sum(-1))
        return two_stage_select(scored.scores, None, places, protected=protected)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def stage1_places(alpha: float, budget: int, at_least: int = 0) -> int:
    """max(⌊α b⌋, min(at_least, b)), exactly."""
    return max(int(Fraction(str(alpha)) * budget), min(at_least, budget))


def _fill(scored: Scored, terms: Tensor, budgets: Tensor, stage1: Tensor) -> Tensor:
    """Stage 2: the rest by the best terms, stage 1 kept."""
    terms = terms.masked_fill(scored.scores == -torch.inf, -torch.inf)
    return two_stage_select(terms, None, budgets, protected=stage1)


def _heads(scored: Scored) -> tuple[Tensor, Tensor]:
    if scored.per_head is None or scored.attention is None:
        raise EvictionError("this value term needs scores per query head; allowed: a scorer that looks at query rows")
    return scored.per_head, scored.attention


def _group_sum(layer: Layer, terms: Tensor) -> Tensor:
    """Σ over the query heads of each kept set, [H, n] → [J, n]."""
    return terms if layer.n_sets == layer.n_heads else terms.unflatten(0, (layer.n_kv_heads, layer.group)).sum(1)


def _sink_mass(layer: Layer, attention: Tensor) -> Tensor:
    """Share of a learned sink [H]: an entry of value 0 that is never evicted; 0 without one."""
    if layer.spec.sink is None:
        return attention.new_zeros(attention.shape[0])
    return (1.0 - attention.sum(-1)).clamp(min=0.0)


def _per_query_head(layer: Layer, keep: Tensor) -> Tensor:
    return keep if keep.shape[0] == layer.n_heads else keep.repeat_interleave(layer.group, 0)


def _bound_terms(scored: Scored, stage1: Tensor, epsilon: float, p: int) -> Tensor:
    """Σ_g (2 − 1/σ_g)₊ (S_g + ε) m_g, [J, n]."""
    scores, attention = _heads(scored)
    layer = scored.layer
    sigma = (attention * _per_query_head(layer, stage1)).sum(-1) + _sink_mass(layer, attention)
    weight = (2.0 - 1.0 / sigma).clamp(min=0.0)
    norms = replace(scored, layer=layer.at_query_heads(), _norms={}).norms(p)
    return _group_sum(layer, weight[:, None] * (scores + epsilon) * norms)


def _centred_terms(scored: Scored, keep: Tensor, epsilon: float, p: int) -> Tensor:
    """Σ_g (S_g + ε) ‖o′_g − 𝒱_i‖, o′_g = (Σ_kept A_g V / Σ_kept A_g) W_O, [J, n]."""
    scores, attention = _heads(scored)
    layer = scored.layer
    kept = attention * _per_query_head(layer, keep)
    mass = kept.sum(-1) + _sink_mass(layer, attention)
    kept = kept / mass.clamp(min=torch.finfo(kept.dtype).tiny)[:, None]
    values = layer.values.float()
    mean = torch.bmm(kept.unflatten(0, (layer.n_kv_heads, layer.group)), values)  # [K, G, d]
    # ‖V W_O − z′ W_O‖ = ‖(V − z′) W_O‖: subtracting before the projection keeps fp32's digits beside a large mean.
    shifted = values[:, None] - mean[:, :, None]
    w_o = layer.w_o.unflatten(0, (layer.n_kv_heads, layer.group))
    distance = torch.stack(
        [projected_norm(shifted[:, g], w_o[:, g], p, "none") for g in range(layer.group)], 1
    )  # [K, G, n]: within one g every kv head has one query head of its own
    return _group_sum(layer, (scores + epsilon) * distance.flatten(0, 1))


SELECTORS = {cls.name: cls for cls in (TopK, TwoStage)}

"""ExpectedAttention: what queries like those of the context would attend to from the positions that come next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.errors import EvictionError
from kvprobe.eviction.layer import Layer
from kvprobe.eviction.scorers import settings
from kvprobe.eviction.scorers.base import Scorer, first


@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """(softmax(s k·μ + s² kᵀΣk / 2) + ε) · ‖v‖₂, μ and Σ of the queries to come (Devoto et al., arXiv 2510.00636).

    Queries before rotation are taken as Gaussian with the mean and covariance (1/N) of the context's, sinks left out;
    μ and Σ are then turned by the mean rotation of the next ``n_future`` positions. s is the layer's scale, and the
    exponent is ln E[exp(s q·k)]. The softmax runs over all entries but the sinks, which always stay. Soft-cap, sliding
    window and learned sinks have no place in the closed form and are left out.

    Attributes
    ----------
    n_future, sinks
        Positions that the rotation is averaged over; first positions that are kept and not counted.
    epsilon
        Added to the weight before the value norm.
    covariance, vnorm
        Whether Σ and ‖v‖ take part.
    """

    name: ClassVar[str] = "expected_attention"
    needs_rotary: ClassVar[bool] = True

    n_future: int = 512
    sinks: int = 4
    epsilon: float = 0.0
    covariance: bool = True
    vnorm: bool = True

    def __post_init__(self) -> None:
        settings.whole("n_future", self.n_future, 1)
        settings.whole("sinks", self.sinks, 0)
        settings.number("epsilon", self.epsilon, 0.0)
        settings.choice("covariance", self.covariance, (True, False))
        settings.choice("vnorm", self.vnorm, (True, False))

    @property
    def value_aware(self) -> bool:
        """See :class:`Scorer`."""
        return self.vnorm

    def rows(self, n: int) -> int:
        """See :class:`Scorer`."""
        return max(n - self.sinks, 0)

    def score(self, layer: Layer) -> Float[Tensor, "H n"]:
        """See :class:`Scorer`."""
        hidden = ~layer.alive | (layer.positions < self.sinks)
        logits = _logits(layer, *self._moments(layer)).masked_fill_(_heads(layer, hidden), -torch.inf)
        blind = (logits == -torch.inf).all(-1, keepdim=True)
        weights = logits.softmax(-1).masked_fill_(blind, 0.0)
        if not self.vnorm:
            return weights
        return (weights + self.epsilon) * _heads(layer, layer.values.float().norm(dim=-1))

    def protected(self, layer: Layer, budgets: Int[Tensor, " J"]) -> Bool[Tensor, "J n"]:
        """The sinks."""
        return first(layer, self.sinks)

    def _moments(self, layer: Layer) -> tuple[Float[Tensor, "H d"], Float[Tensor, "H d d"] | None]:
        """μ and Σ of the queries to come."""
        count, end, device = self.rows(layer.length), layer.length, layer.keys.device
        if count < 1 or layer.rotary is None:
            given = f"{layer.length} tokens" if layer.rotary is not None else "a layer without its rotation"
            raise EvictionError(f"{self.name}: {given}; allowed: more than sinks={self.sinks} tokens of a rotary model")
        queries = layer.rotary.unrotate(layer.rows(count).float(), torch.arange(end - count, end, device=device))
        turn = layer.rotary.mean_matrix(torch.arange(end, end + self.n_future, device=device))
        mean = queries.mean(1, keepdim=True)
        centred = queries - mean
        covariance = turn @ (centred.transpose(1, 2) @ centred / count) @ turn.T if self.covariance else None
        return (mean @ turn.T)[:, 0], covariance


def _logits(layer: Layer, mean: Tensor, covariance: Tensor | None) -> Float[Tensor, "H n"]:
    """s k·μ + s² kᵀΣk / 2, one query head at a time: nothing larger than its keys."""
    logits = mean.new_empty(layer.n_heads, layer.n)
    for head in range(layer.n_heads):
        keys = layer.keys[head // layer.group].float() * layer.spec.scale
        logits[head] = keys @ mean[head]
        if covariance is not None:
            logits[head] += ((keys @ covariance[head]) * keys).sum(-1) / 2
    return logits


def _heads(layer: Layer, per_kv_head: Tensor) -> Tensor:
    return per_kv_head.repeat_interleave(layer.group, 0)

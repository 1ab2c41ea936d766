"""OBCache: how far the head's output moves when an entry's key and value go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.eviction.layer import Layer
from kvprobe.eviction.scorers import settings
from kvprobe.eviction.scorers.base import Scorer, last
from kvprobe.twopart import cap


@dataclass(frozen=True)
class OBCache(Scorer):
    """Σ over the last ``window`` queries of ‖A_p v_p + A_p z_p (v_p − o)‖², the joint form (arXiv 2510.07651).

    First-order change of the head's output o = Σ A v (before W_O) when value v_p and logit z_p (after scale and
    soft-cap) both go to 0; W_O has no part in it. The window always stays. No pooling.
    """

    name: ClassVar[str] = "obcache"

    window: int = 32

    def __post_init__(self) -> None:
        settings.whole("window", self.window, 1)

    @property
    def value_aware(self) -> bool:
        """See :class:`Scorer`."""
        return True

    def rows(self, n: int) -> int:
        """See :class:`Scorer`."""
        return self.window

    def score(self, layer: Layer) -> Float[Tensor, "H n"]:
        """See :class:`Scorer`."""
        queries, values = layer.rows(self.window), layer.values.double()
        total = values.new_zeros(layer.n_kv_heads, layer.group, layer.n)
        for rows, weights in layer.attention(self.window):
            logits = _logits(layer, queries[:, rows])
            total += _moved(_grouped(layer, weights).double(), _grouped(layer, logits).double(), values).sum(2)
        return total.flatten(0, 1).float()

    def protected(self, layer: Layer, budgets: Int[Tensor, " J"]) -> Bool[Tensor, "J n"]:
        """The observation window."""
        return last(layer, self.window)


def _moved(weights: Tensor, logits: Tensor, values: Tensor) -> Float[Tensor, "K G rows n"]:
    """‖A v + A z (v − o)‖² = A² ((1 + z)² v·v − 2 z (1 + z) v·o + z² o·o), all entries of a block of rows.

    fp64: where v lies near z o / (1 + z) the three terms cancel, and there the score is small but not noise.
    """
    output = torch.matmul(weights.flatten(1, 2), values)  # [K, G·rows, d]
    cross = torch.matmul(output, values.transpose(1, 2)).view_as(weights)
    own = values.square().sum(-1)[:, None, None]
    mean = output.square().sum(-1).view(*weights.shape[:3], 1)
    more = 1.0 + logits
    return weights.square() * (more.square() * own - 2 * logits * more * cross + logits.square() * mean).clamp(min=0.0)


def _logits(layer: Layer, queries: Tensor) -> Float[Tensor, "H rows n"]:
    """Logits of every entry, visible or not: what is not has weight 0."""
    grouped = (queries.float() * layer.spec.scale).reshape(layer.n_kv_heads, -1, queries.shape[-1])
    logits = torch.bmm(grouped, layer.keys.float().transpose(1, 2))
    return cap(logits, layer.spec.softcap).view(*queries.shape[:2], layer.n)


def _grouped(layer: Layer, rows: Tensor) -> Tensor:
    return rows.unflatten(0, (layer.n_kv_heads, layer.group))

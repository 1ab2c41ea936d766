"""TOVA: what the last query attends to, agreed on by all heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.errors import EvictionError
from kvprobe.eviction.layer import Layer
from kvprobe.eviction.scorers.base import Scorer, last


@dataclass(frozen=True)
class TOVA(Scorer):
    """The last query's attention row, averaged over all query heads: one kept set a layer; the last token stays.

    Oren et al., arXiv 2401.06104. Heads must hold the same entries: they do as long as budgets are equal and nothing
    but this score has chosen them; otherwise it is refused.
    """

    name: ClassVar[str] = "tova"
    one_set: ClassVar[bool] = True

    def rows(self, n: int) -> int:
        """See :class:`Scorer`."""
        return 1

    def score(self, layer: Layer) -> Float[Tensor, "K n"]:
        """See :class:`Scorer`."""
        if not bool((layer.positions == layer.positions[:1]).all()):
            raise EvictionError(
                "tova averages one row over all heads, and after an eviction they hold different entries; "
                "allowed: uniform budgets with topk"
            )
        return layer.mean_attention(1).mean(0).expand(layer.n_kv_heads, -1)

    def protected(self, layer: Layer, budgets: Int[Tensor, " J"]) -> Bool[Tensor, "J n"]:
        """The last token."""
        return last(layer, 1)

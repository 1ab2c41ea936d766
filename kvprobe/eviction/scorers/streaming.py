"""StreamingLLM: attention sinks and the most recent entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.eviction.layer import Layer
from kvprobe.eviction.scorers import settings
from kvprobe.eviction.scorers.base import Scorer, first


@dataclass(frozen=True)
class Streaming(Scorer):
    """The first ``sinks`` positions always stay; the rest goes by recency (Xiao et al., arXiv 2309.17453).

    The score is the position: no attention is looked at, so there is no first stage to a two-stage selection. Keys keep
    their rotation; the original re-numbers positions inside its window.
    """

    name: ClassVar[str] = "streaming"
    attention: ClassVar[bool] = False

    sinks: int = 4

    def __post_init__(self) -> None:
        settings.whole("sinks", self.sinks, 0)

    def score(self, layer: Layer) -> Float[Tensor, "K n"]:
        """See :class:`Scorer`."""
        return layer.positions.float()

    def protected(self, layer: Layer, budgets: Int[Tensor, " J"]) -> Bool[Tensor, "J n"]:
        """The sinks."""
        return first(layer, self.sinks)

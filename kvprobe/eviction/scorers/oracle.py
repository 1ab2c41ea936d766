"""Oracle: what the tokens after the context really attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.errors import EvictionError
from kvprobe.eviction.layer import Layer
from kvprobe.eviction.scorers import settings
from kvprobe.eviction.scorers.base import Scorer


@dataclass(frozen=True)
class Oracle(Scorer):
    """Attention of the queries that come after the context, their mean or their maximum: an upper reference.

    No cache can know it. The later tokens' own keys are not in the layer: a row holds *shares among the context's
    entries* (a learned sink stays in the denominator), the exact row divided by the mass that it gives the context.
    Within a row the order is the exact one; between rows every query counts alike, however much context it looks at.

    Attributes
    ----------
    reduce
        Over the later queries: ``"mean"`` or ``"max"``.
    """

    name: ClassVar[str] = "oracle"
    needs_future: ClassVar[bool] = True

    reduce: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        settings.choice("reduce", self.reduce, ("mean", "max"))

    def score(self, layer: Layer) -> Float[Tensor, "H n"]:
        """See :class:`Scorer`."""
        if layer.future is None or layer.future.shape[1] == 0:
            raise EvictionError(
                "oracle looks at queries of the tokens after the context; allowed: future=… with one or more"
            )
        count = layer.future.shape[1]
        at = torch.arange(layer.length, layer.length + count, device=layer.keys.device)
        total = torch.zeros(layer.n_heads, layer.n, device=layer.keys.device)
        for _, weights in layer.attend(layer.future, at):
            total = total + weights.sum(1) if self.reduce == "mean" else torch.maximum(total, weights.amax(1))
        return total / count if self.reduce == "mean" else total

"""Knorm: keys of small norm are attended to most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from kvprobe.eviction.layer import Layer
from kvprobe.eviction.scorers.base import Scorer


@dataclass(frozen=True)
class Knorm(Scorer):
    """−‖k‖₂ in fp32, where bf16 would tie many entries (Devoto et al., arXiv 2406.11430).

    Two-stage selection is refused: scores are negative, and multiplying them by a value norm would rank entries with
    large values *lower*, the opposite of what the value term is for.
    """

    name: ClassVar[str] = "knorm"
    attention: ClassVar[bool] = False

    def score(self, layer: Layer) -> Float[Tensor, "K n"]:
        """See :class:`Scorer`."""
        return -layer.keys.float().norm(dim=-1)

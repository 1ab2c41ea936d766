"""SnapKV: what the last queries of the prompt attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.eviction.layer import Layer
from kvprobe.eviction.scorers.base import Scorer, last
from kvprobe.eviction.scorers.windows import Pooling, check_window, window_means


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Mean attention of the last ``window`` queries, pooled over positions, then averaged over the group.

    Softmax over all keys in fp32, causal inside the window; the window's own columns are dropped and its entries always
    stay (Li et al., arXiv 2404.14469). The default pooling is the paper's of CriticalKV (``max``, 7); the code released
    with it, and kvpress, use ``pool="avg", kernel=5``.
    """

    name: ClassVar[str] = "snapkv"

    window: int = 32
    pool: Pooling = "max"
    kernel: int = 7

    def __post_init__(self) -> None:
        check_window(self)

    def rows(self, n: int) -> int:
        """See :class:`Scorer`."""
        return self.window

    def score(self, layer: Layer) -> Float[Tensor, "J n"]:
        """See :class:`Scorer`."""
        return window_means(layer, self.window, self.pool, self.kernel)

    def protected(self, layer: Layer, budgets: Int[Tensor, " J"]) -> Bool[Tensor, "J n"]:
        """The observation window."""
        return last(layer, self.window)

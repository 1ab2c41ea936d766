"""H2O: heavy hitters, what all queries together attended to, and the recent entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.eviction.layer import Layer
from kvprobe.eviction.scorers import settings
from kvprobe.eviction.scorers.base import Scorer, last


@dataclass(frozen=True)
class H2O(Scorer):
    """Sums of the attention columns over all queries; half of a budget goes to the most recent entries.

    Of b entries a set, the recent b − ⌊b/2⌋ always stay and ⌊b/2⌋ heavy ones are chosen among the others (Zhang et al.,
    arXiv 2306.14048). It is *not* H2O's recurrent eviction: there each step evicts one entry and later rows never see
    it; here every row is the exact one over all entries that are there.

    Attributes
    ----------
    norm
        ``"none"``: raw sums, which favour early keys like ln(n / i); ``"queries_seen"``: each sum divided by the number
        of queries that saw the entry (n − i, at most the layer's sliding window).
    """

    name: ClassVar[str] = "h2o"

    norm: Literal["none", "queries_seen"] = "none"

    def __post_init__(self) -> None:
        settings.choice("norm", self.norm, ("none", "queries_seen"))

    def rows(self, n: int) -> int:
        """See :class:`Scorer`."""
        return n

    def score(self, layer: Layer) -> Float[Tensor, "H n"]:
        """See :class:`Scorer`."""
        sums = column_sums(layer, self.rows(layer.length))
        return sums if self.norm == "none" else sums / _queries_seen(layer)

    def protected(self, layer: Layer, budgets: Int[Tensor, " J"]) -> Bool[Tensor, "J n"]:
        """The recent half."""
        return recent_half(layer, budgets)


@dataclass(frozen=True)
class H2O256(Scorer):
    """Sums of the attention columns over the last ``window`` queries (all of them where there are fewer), no pooling.

    The stand-in for H2O that long contexts are compared with; no code of it is public, so this is our reading: the
    observation window is 256 queries wide, recent and heavy halves are H2O's.
    """

    name: ClassVar[str] = "h2o_256"

    window: int = 256

    def __post_init__(self) -> None:
        settings.whole("window", self.window, 1)

    def rows(self, n: int) -> int:
        """See :class:`Scorer`."""
        return min(self.window, n)

    def score(self, layer: Layer) -> Float[Tensor, "H n"]:
        """See :class:`Scorer`."""
        return column_sums(layer, self.rows(layer.length))

    def protected(self, layer: Layer, budgets: Int[Tensor, " J"]) -> Bool[Tensor, "J n"]:
        """The recent half."""
        return recent_half(layer, budgets)


def column_sums(layer: Layer, count: int) -> Float[Tensor, "H n"]:
    """Σ over the last ``count`` queries of their attention rows."""
    return layer.mean_attention(count) * count


def recent_half(layer: Layer, budgets: Int[Tensor, " J"]) -> Bool[Tensor, "J n"]:
    """The last b − ⌊b/2⌋ entries of each set."""
    return last(layer, budgets - budgets // 2)


def _queries_seen(layer: Layer) -> Float[Tensor, "H n"]:
    seen = layer.length - layer.positions
    if layer.spec.window is not None:
        seen = seen.clamp(max=layer.spec.window)
    return seen.float().repeat_interleave(layer.group, 0)

"""What a budget is: how many entries does each kept set hold?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Request:
    """What a budget shares out.

    Attributes
    ----------
    base
        b, entries a kept set on average: ⌊cache · length⌋.
    length
        Tokens seen so far.
    cache
        The share to keep, as given.
    scores
        Per layer [J, n]; −∞ on entries that are not there (any more).
    reserved
        Per layer [J, n]: entries that the scorer keeps whatever their score, at b entries a set.
    group
        Query heads per kept set: H / J.
    """

    base: int
    length: int
    cache: Any
    scores: Sequence[Float[Tensor, "J n"]]
    reserved: Sequence[Bool[Tensor, "J n"]]
    group: int

    @property
    def n_layers(self) -> int:
        """Number of layers L."""
        return len(self.scores)

    @property
    def n_sets(self) -> int:
        """Kept sets a layer, J."""
        return int(self.scores[0].shape[0])

    @property
    def reserve(self) -> int:
        """Most entries that any set reserves (SnapKV: the window w)."""
        return max(int(each.sum(-1).max()) for each in self.reserved)


@dataclass(frozen=True)
class Allocation:
    """Budgets of all kept sets, and what there is to say about them.

    Attributes
    ----------
    budgets
        [L, J] whole numbers.
    at_least
        Stage-1 places that every set has at least (AdaKV's safeguard).
    notes
        Facts that belong in every result, such as ``{"fallback": True}``.
    """

    budgets: Int[Tensor, "L J"]
    at_least: int
    notes: dict[str, Any]


@dataclass(frozen=True)
class Budget:
    """Base of all budgets: subclass it, set ``name``, write ``allocate``.

    Attributes
    ----------
    name
        The name that :func:`kvprobe.eviction.policy` knows it by.
    needs_attention
        Compares scores between heads: they must be attention masses.
    shares_base
        The total follows from b; where it does not (DuoAttention's follows from the number of streaming heads), b may
        be smaller than what a set always keeps.
    """

    name: ClassVar[str] = ""
    needs_attention: ClassVar[bool] = False
    shares_base: ClassVar[bool] = True

    @property
    def exact_over(self) -> str:
        """What holds b entries a set on average: every ``"head"``, every ``"layer"``, or the ``"model"``."""
        return "model"

    def allocate(self, request: Request) -> Allocation:
        """Share ``base`` · J · L entries out; every budget lies between the set's reserved and its present entries."""
        raise NotImplementedError

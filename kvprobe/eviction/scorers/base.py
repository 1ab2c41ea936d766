"""What a scorer is: how important is each entry of a layer's cache?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.eviction.layer import Layer


@dataclass(frozen=True)
class Scorer:
    """Base of all scorers: subclass it, set ``name``, write ``score``; the policy does the rest.

    Attributes
    ----------
    name
        The name that :func:`kvprobe.eviction.policy` knows it by.
    attention
        Scores are attention masses ≥ 0 (or grow with them). Only then is there a first stage to a two-stage selection,
        and something that AdaKV can compare between heads.
    value_aware
        Scores already contain the values: a two-stage selection would count them twice, and is refused.
    default_budget
        The budget that the method is published with.
    needs_rotary, needs_future
        Ask for ``layer.rotary``, or for ``layer.future`` (queries of the tokens that come after).
    aligned
        Compares entries between heads position by position: all heads must hold the same entries.
    kv_heads_only
        Has no meaning for a query head by itself.
    protects_once
        ``protected`` counts at the average budget b, and does not grow where a set turns out to hold more.
    one_set
        Scores all heads of a layer alike: a cache that was evicted before must hold the same entries on all of them.
    """

    name: ClassVar[str] = ""
    attention: ClassVar[bool] = True
    default_budget: ClassVar[str] = "uniform"
    needs_rotary: ClassVar[bool] = False
    needs_future: ClassVar[bool] = False
    aligned: ClassVar[bool] = False
    kv_heads_only: ClassVar[bool] = False
    protects_once: ClassVar[bool] = False
    one_set: ClassVar[bool] = False

    @property
    def value_aware(self) -> bool:
        """See the class."""
        return False

    def rows(self, n: int) -> int:
        """How many of the last query rows ``score`` looks at, of n tokens seen; 0 for none."""
        return 0

    def score(self, layer: Layer) -> Float[Tensor, "heads n"]:
        """Importance of every entry, [H, n] per query head or [K, n] per kv head; larger stays longer.

        Scores per query head are averaged over their group by the policy. Pads may get any finite score.
        """
        raise NotImplementedError

    def protected(self, layer: Layer, budgets: Int[Tensor, " J"]) -> Bool[Tensor, "J n"]:
        """Entries that stay whatever their score; they count in the budget. None by default."""
        return torch.zeros(layer.n_sets, layer.n, dtype=torch.bool, device=layer.keys.device)


def last(layer: Layer, counts: Int[Tensor, " J"] | int) -> Bool[Tensor, "J n"]:
    """The last ``counts`` entries of each kept set: entries end at the right, pads are on the left."""
    slots = torch.arange(layer.n, 0, -1, device=layer.keys.device)
    counts = torch.as_tensor(counts, device=layer.keys.device).expand(layer.n_sets)
    return slots[None] <= counts[:, None]


def first(layer: Layer, count: int) -> Bool[Tensor, "J n"]:
    """Entries at positions 0 … count − 1 (attention sinks)."""
    positions = layer.positions if layer.granularity == "kv_head" else layer.positions.repeat_interleave(layer.group, 0)
    return (positions >= 0) & (positions < count)

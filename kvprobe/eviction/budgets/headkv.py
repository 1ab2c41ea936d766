"""HeadKV: heads that retrieve hold more."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from os import PathLike
from typing import Any, ClassVar

import torch

from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.budgets.base import Allocation, Budget, Request
from kvprobe.eviction.budgets.profiles import HeadProfile, Rows, read_profile, rows
from kvprobe.eviction.budgets.sharing import check_total, exact, present_counts, water_fill


@dataclass(frozen=True)
class HeadKV(Budget):
    """Budgets by the importance of each head, a table [L, H] of retrieval scores or the path of a JSON profile.

    With w entries reserved, b′ = b − w, and s the importance as shares of the whole model (summed over the query heads
    of a kept set):  cap = s · ⌊b′/β⌋ · L · J  +  b′ − ⌊b′/β⌋  +  w. A larger β makes the pool that heads compete for
    *smaller*. (Fu et al., arXiv 2410.19258, whose code rounds every cap by itself and clips at n.) Here a set that is
    full passes the rest on to the others, by their importance, and the largest remainder rounds: the model holds
    b·L·J entries exactly.

    Attributes
    ----------
    importance
        [L, H] per **query** head, numbers ≥ 0: nested tuples, a tensor, a :class:`HeadProfile`, or the path of one.
    beta
        β ≥ 1.
    """

    name: ClassVar[str] = "headkv"

    importance: Any
    beta: float = 1.5

    def __post_init__(self) -> None:
        beta = exact(self.beta)
        if beta is None or beta < 1:
            raise EvictionError(f"beta={quote(self.beta)}; allowed: a number ≥ 1")
        given = self.importance
        profile = read_profile(given) if isinstance(given, (str, PathLike)) else given
        table = rows(profile.scores if isinstance(profile, HeadProfile) else profile, "importance")
        if (least := min(min(row) for row in table)) < 0:
            raise EvictionError(f"importance holds {least}; allowed: numbers ≥ 0")
        if not any(any(row) for row in table):
            raise EvictionError("importance is 0 for every head; allowed: numbers ≥ 0, at least one of them > 0")
        object.__setattr__(self, "importance", table)

    def allocate(self, request: Request) -> Allocation:
        """See :class:`Budget`."""
        present = present_counts(request)
        weights = _weights(self.importance, request)
        upper = present.flatten().tolist()
        total = request.base * len(upper)
        check_total(total, request.reserve * len(upper), sum(upper), f"{len(upper)} sets", self.name)
        pool = int((request.base - request.reserve) / Fraction(str(self.beta)))
        budgets = water_fill([request.base - pool] * len(upper), weights, upper, total)
        return Allocation(torch.tensor(budgets, device=present.device).view(present.shape), 0, {})


def _weights(importance: Rows, request: Request) -> list[int]:
    """Importance of every kept set, in the whole numbers that floats are multiples of."""
    n_heads = request.n_sets * request.group
    if (len(importance), len(importance[0])) != (request.n_layers, n_heads):
        raise EvictionError(
            f"importance of shape [{len(importance)}, {len(importance[0])}]; allowed: [{request.n_layers}, {n_heads}], "
            "layers × query heads"
        )
    ratios = [[each.as_integer_ratio() for each in row] for row in importance]
    unit = max(below for row in ratios for _, below in row)  # denominators are powers of two: the largest serves all
    whole = [above * (unit // below) for row in ratios for above, below in row]
    return [sum(whole[i : i + request.group]) for i in range(0, len(whole), request.group)]

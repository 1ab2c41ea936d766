"""PyramidKV: early layers hold more, late layers less."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch

from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.budgets.base import Allocation, Budget, Request
from kvprobe.eviction.budgets.sharing import check_total, exact, present_counts, reserved_counts, water_fill


@dataclass(frozen=True)
class Pyramid(Budget):
    """A linear ramp over the layers, from 2b − b/β at the first to b/β at the last; all heads of a layer alike.

    With n entries present and w reserved, max = 2b − b/β is at most n − w (then min = 2b − max), and n ≥ max ≥ min ≥ w
    must hold; where it does not, every layer holds b and ``notes`` say ``{"fallback": True}`` (Cai et al., arXiv
    2406.02069, by kvpress' rule: with w = 32 and β = 20, any b < 640 falls back). The ramp is rounded by the largest
    remainder, so that the layers hold b on average exactly; kvpress takes b = n(1 − r) as a real number and rounds each
    layer by itself (its fallback round(b), not ⌊b⌋), so that its layers can differ by one or two from these. A single
    layer holds b.

    Where sets hold too little for the ramp (after an earlier eviction), what they cannot take goes to the others.

    Attributes
    ----------
    beta
        Steepness β ≥ 1; 1 is uniform.
    """

    name: ClassVar[str] = "pyramid"

    beta: float = 20

    def __post_init__(self) -> None:
        beta = exact(self.beta)
        if beta is None or beta < 1:
            raise EvictionError(f"beta={quote(self.beta)}; allowed: a number ≥ 1")

    def allocate(self, request: Request) -> Allocation:
        """See :class:`Budget`."""
        present, reserve = present_counts(request), int(reserved_counts(request).max())
        upper = present.flatten().tolist()
        total = request.base * len(upper)
        check_total(total, reserve * len(upper), sum(upper), f"{len(upper)} sets", self.name)
        ends = self._ends(request.base, max(upper), reserve)
        layers = _ramp(*ends, request.n_layers) if ends else [request.base] * request.n_layers
        start = [each for each in layers for _ in range(request.n_sets)]
        budgets = water_fill(start, [1] * len(start), upper, total)
        shaped = torch.tensor(budgets, device=present.device).view(present.shape)
        return Allocation(shaped, 0, {"fallback": ends is None})

    def _ends(self, base: int, n: int, reserve: int) -> tuple[Fraction, Fraction] | None:
        """Budgets of the first and the last layer, or None where there is no such ramp."""
        most = 2 * base - base / Fraction(str(self.beta))
        most = min(most, Fraction(n - reserve))
        least = 2 * base - most
        return (most, least) if n >= most >= least >= reserve else None


def _ramp(first: Fraction, last: Fraction, n_layers: int) -> list[int]:
    """The straight line from ``first`` to ``last``, in whole numbers of the same sum."""
    if n_layers == 1:
        return [int((first + last) / 2)]
    line = [first - layer * (first - last) / (n_layers - 1) for layer in range(n_layers)]
    whole = [int(each) for each in line]
    left = int(sum(line)) - sum(whole)
    for layer in sorted(range(n_layers), key=lambda layer: whole[layer] - line[layer])[:left]:
        whole[layer] += 1
    return whole

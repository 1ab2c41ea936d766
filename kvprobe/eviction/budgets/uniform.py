"""Uniform budgets: the same number of entries everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvprobe.eviction.budgets.base import Allocation, Budget, Request


@dataclass(frozen=True)
class Uniform(Budget):
    """b = ⌊cache · n⌋ entries a kept set, the protected ones included."""

    name: ClassVar[str] = "uniform"

    @property
    def exact_over(self) -> str:
        """See :class:`Budget`."""
        return "head"

    def allocate(self, request: Request) -> Allocation:
        """See :class:`Budget`."""
        shape = (request.n_layers, request.n_sets)
        return Allocation(torch.full(shape, request.base, device=request.scores[0].device), 0, {})

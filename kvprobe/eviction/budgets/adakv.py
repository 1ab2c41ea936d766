"""AdaKV: the heads of a layer share its budget by their scores."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.budgets.base import Allocation, Budget, Request
from kvprobe.eviction.budgets.sharing import (
    best_counts,
    check_total,
    exact,
    free_scores,
    present_counts,
    reserved_counts,
)

MIX = Fraction(1, 5)


@dataclass(frozen=True)
class AdaKV(Budget):
    """b·J entries a layer, shared by the top-k over all its heads; each head is sure of ⌊safeguard·b⌋.

    Reserved entries come first and count in the safeguard, then the best of every head up to it, then the best of the
    layer by (−score, head, position) (Feng et al., arXiv 2407.11550, as in kvpress). Stage 1 of a two-stage selector
    gets at least ⌊safeguard·b⌋ places.

    Attributes
    ----------
    safeguard
        A share of b (a safeguard of no more than the reserved entries does nothing); or ``"mix"``, the rule of the
        authors' own code: reserved + round(0.2·b′ + 0.8·count) with b′ = b less the reserved entries and ``count`` from
        the top-k over what is not reserved. Its totals are off by the rounding, and ``notes`` say by how much over the
        whole model (``total_off``). (That code also rounds 0.2·b′ down first; equal wherever 5 divides b′.)
    """

    name: ClassVar[str] = "adakv"
    needs_attention: ClassVar[bool] = True

    safeguard: float | Literal["mix"] = 0.2

    def __post_init__(self) -> None:
        share = exact(self.safeguard)
        if self.safeguard != "mix" and (share is None or not 0 <= share <= 1):
            raise EvictionError(f"safeguard={quote(self.safeguard)}; allowed: a share between 0 and 1, 'mix'")

    @property
    def exact_over(self) -> str:
        """See :class:`Budget`."""
        return "layer"

    def allocate(self, request: Request) -> Allocation:
        """See :class:`Budget`."""
        mix = self.safeguard == "mix"
        at_least = int((MIX if mix else Fraction(str(self.safeguard))) * request.base)
        present, reserved = present_counts(request), reserved_counts(request)
        sure = reserved if mix else torch.maximum(reserved, present.clamp(max=at_least))
        counts = _shared(request, reserved, sure, present)
        if not mix:
            return Allocation(sure + counts, at_least, {})
        budgets = _mixed(request.base - reserved, reserved, counts, present)
        off = int(budgets.sum()) - request.base * budgets.numel()
        return Allocation(budgets, at_least, {"total_off": off})


def _shared(request: Request, reserved: Tensor, sure: Tensor, present: Tensor) -> Tensor:
    """What each set gets, beyond what it is sure of, in the top-k over its layer, [L, J]."""
    counts = []
    for layer, free in enumerate(free_scores(request)):
        total, least = request.base * request.n_sets, int(sure[layer].sum())
        check_total(total, least, int(present[layer].sum()), f"layer {layer}", AdaKV.name)
        ranked = free.to(sure.device).sort(-1, descending=True).values
        taken = torch.arange(ranked.shape[1], device=sure.device) < (sure - reserved)[layer, :, None]
        counts.append(best_counts([ranked.masked_fill(taken, -torch.inf)], total - least))
    return torch.cat(counts)


def _mixed(rest: Tensor, reserved: Tensor, counts: Tensor, present: Tensor) -> Tensor:
    """Reserved + round(0.2 · rest + 0.8 · counts), at most what is there."""
    # Fifths are never halves, so that adding a half and rounding down is rounding.
    mixed = (2 * rest + 8 * counts + 5).div(10, rounding_mode="floor")
    return torch.minimum(reserved + mixed.clamp(min=0), present)

"""Layer-global budgets: one top-k over the heads of a layer, or over the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.budgets.base import Allocation, Budget, Request
from kvprobe.eviction.budgets.sharing import best_counts, check_total, free_scores, present_counts, reserved_counts

SCOPES = ("layer", "model")


@dataclass(frozen=True)
class LayerGlobal(Budget):
    """One top-k over all heads of a layer (b·J entries), or over all layers and heads (b·J·L entries).

    Reserved entries come first, the others by (−score, layer, head, position). DefensiveKV uses ``scope="layer"``.

    Attributes
    ----------
    scope
        ``"layer"`` or ``"model"``.
    """

    name: ClassVar[str] = "layer_global"
    needs_attention: ClassVar[bool] = True

    scope: Literal["layer", "model"] = "layer"

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise EvictionError(f"scope={quote(self.scope)}; allowed: {', '.join(SCOPES)}")

    @property
    def exact_over(self) -> str:
        """See :class:`Budget`."""
        return self.scope

    def allocate(self, request: Request) -> Allocation:
        """See :class:`Budget`."""
        reserved, present, free = reserved_counts(request), present_counts(request), free_scores(request)
        step = 1 if self.scope == "layer" else request.n_layers
        budgets = []
        for first in range(0, request.n_layers, step):
            part = slice(first, first + step)
            total, least = request.base * request.n_sets * step, int(reserved[part].sum())
            where = f"layer {first}" if self.scope == "layer" else f"{request.n_layers} layers"
            check_total(total, least, int(present[part].sum()), where, self.name)
            budgets.append(reserved[part] + best_counts(free[part], total - least).to(reserved.device))
        return Allocation(torch.cat(budgets), 0, {})

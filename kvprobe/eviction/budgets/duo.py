"""DuoAttention: some heads hold everything, the others sinks and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.budgets.base import Allocation, Budget, Request
from kvprobe.eviction.budgets.profiles import read_gates, rows
from kvprobe.eviction.budgets.sharing import exact, present_counts, reserved_counts


@dataclass(frozen=True)
class Duo(Budget):
    """Full heads and streaming heads, told apart by gates [L, K] in [0, 1] (a table, or the path of a TSV file).

    The ⌊ratio · L · K⌋ heads of the lowest gates, ties by (layer, head), stream: they hold min(n, sinks + recent)
    entries, the others all n (Xiao et al., arXiv 2410.10819; kvpress rounds the number of heads to the nearest, and
    leaves ties unordered). So the model's total follows from ``ratio``, not from b: ``notes`` give the number of
    ``streaming_heads`` and the ``share`` of all entries that is kept.

    Attributes
    ----------
    gates
        One gate a kv head: nested tuples, a tensor, or the path of a TSV file (layers × kv heads).
    ratio
        Share of heads that stream; None: 1 − cache, the share that other policies remove.
    sinks, recent
        First and last entries of a streaming head.
    """

    name: ClassVar[str] = "duo"
    shares_base: ClassVar[bool] = False

    gates: Any
    ratio: float | None = None
    sinks: int = 128
    recent: int = 256

    def __post_init__(self) -> None:
        _check_count("sinks", self.sinks, 0)
        _check_count("recent", self.recent, 1)
        share = exact(self.ratio)
        if self.ratio is not None and (share is None or not 0 <= share <= 1):
            raise EvictionError(f"ratio={quote(self.ratio)}; allowed: a share of heads between 0 and 1, or None")
        given = self.gates
        table = read_gates(given) if isinstance(given, (str, PathLike)) else rows(given, "gates")
        if wrong := [each for row in table for each in row if not 0 <= each <= 1]:
            raise EvictionError(f"gates hold {wrong[0]}; allowed: numbers between 0 and 1")
        object.__setattr__(self, "gates", table)

    def allocate(self, request: Request) -> Allocation:
        """See :class:`Budget`; the total is what the heads come to, whatever ``request.base``."""
        self._fits(request)
        present, reserved = present_counts(request), reserved_counts(request)
        streaming = self._streaming(request, present.device)
        held = self.sinks + self.recent
        if (most := int((reserved * streaming).max())) > held:
            raise EvictionError(
                f"sinks + recent = {held} entries a streaming head; allowed: the reserved {most} or more"
            )
        budgets = torch.where(streaming, present.clamp(max=held), present)
        share = int(budgets.sum()) / max(request.length * budgets.numel(), 1)
        return Allocation(budgets, 0, {"streaming_heads": int(streaming.sum()), "share": share})

    def _streaming(self, request: Request, device: torch.device) -> Tensor:
        """Boolean [L, K]: the heads of the lowest gates."""
        share = exact(self.ratio)
        if share is None:
            kept = exact(request.cache)
            if kept is None or not 0 <= kept <= 1:
                raise EvictionError(f"cache {quote(request.cache)} is no share of heads; allowed: 0 to 1, or ratio=…")
            share = 1 - kept
        gates = torch.tensor(self.gates, dtype=torch.float64)
        lowest = gates.flatten().argsort(stable=True)[: int(share * gates.numel())]
        streaming = torch.zeros(gates.numel(), dtype=torch.bool)
        streaming[lowest] = True
        return streaming.view(gates.shape).to(device)

    def _fits(self, request: Request) -> None:
        given, asked = [len(self.gates), len(self.gates[0])], [request.n_layers, request.n_sets]
        if given != asked:
            raise EvictionError(f"gates of shape {given}; allowed: {asked}, layers × kv heads")


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise EvictionError(f"{name}={quote(value)}; allowed: a whole number ≥ {least}")

"""DuoAttention: some heads hold everything, the others sinks and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.budgets.base import Allocation, Budget, Request
from kvprobe.eviction.budgets.profiles import HeadProfile, Rows, read_gates, read_profile, rows
from kvprobe.eviction.budgets.sharing import exact, present_counts, reserved_counts


@dataclass(frozen=True)
class Duo(Budget):
    """Full heads and streaming heads, told apart by gates [L, K] in [0, 1].

    The ⌊ratio · L · K⌋ heads of the lowest gates, ties by (layer, head), stream: they hold min(n, sinks + recent)
    entries, the others all n (Xiao et al., arXiv 2410.10819; kvpress rounds the number of heads to the nearest, and
    leaves ties unordered). So the model's total follows from ``ratio``, not from b: ``notes`` give the number of
    ``streaming_heads`` and the ``share`` of all entries that is kept.

    Attributes
    ----------
    gates
        One gate a kv head: nested tuples, a tensor, or the path of a TSV file (layers × kv heads). Or a head profile,
        as such or the path of its JSON: the gate of a query head is its score over the largest score of the model.
        Gates of query heads [L, H] become those of kept sets by their maximum: a set that one head needs is kept.
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
        table = _table(self.gates)
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
        if gates.shape[1] != request.n_sets:  # of query heads
            gates = gates.unflatten(1, (request.n_sets, request.group)).amax(-1)
        lowest = gates.flatten().argsort(stable=True)[: int(share * gates.numel())]
        streaming = torch.zeros(gates.numel(), dtype=torch.bool)
        streaming[lowest] = True
        return streaming.view(gates.shape).to(device)

    def _fits(self, request: Request) -> None:
        given, asked = [len(self.gates), len(self.gates[0])], [request.n_layers, request.n_sets]
        wide = [request.n_layers, request.n_sets * request.group]
        if given not in (asked, wide):
            raise EvictionError(f"gates of shape {given}; allowed: {asked}, layers × kv heads, or {wide}, query heads")


def _table(given: Any) -> Rows:
    """Gates from whatever says them: a table, a TSV file, a profile, or a profile's file."""
    if isinstance(given, (str, PathLike)):
        if Path(given).suffix != ".json":
            return read_gates(given)
        given = read_profile(given)
    return given.gates() if isinstance(given, HeadProfile) else rows(given, "gates")


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise EvictionError(f"{name}={quote(value)}; allowed: a whole number ≥ {least}")

"""The biases of one chunk of arms and rows, gathered so that a layer applies them in a few operations.

Shapes: b arms of the chunk, K kv heads, G query heads a group, t rows, C columns with a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


class KeyBias(Protocol):
    """The additive bias of one arm at one layer (see :mod:`kvprobe.interventions.plan`)."""

    @property
    def columns(self) -> Tensor:
        """Sorted absolute key positions that the bias can touch, [C]."""
        ...

    def at(self, positions: Tensor) -> Tensor:
        """Bias [H or 1, t or 1, C] ≤ 0 for queries at these absolute positions; 1 where they are all alike."""
        ...


@dataclass(frozen=True)
class _Side:
    """Where a chunk's biases fall in one part of the logits: index [b, C], bias [b, K, G, t or 1, C], real [b, C]."""

    index: Tensor
    bias: Tensor
    real: Tensor

    @cached_property
    def loss(self) -> Tensor:
        """What a weight of 1 loses, 1 − e^bias; 0 for the columns that only pad."""
        return torch.expm1(self.bias).neg_() * self.real[:, None, None, None]

    @cached_property
    def met(self) -> Tensor:
        """Boolean: cells with a bias, pads not counted."""
        return (self.bias < 0) & self.real[:, None, None, None]

    @cached_property
    def dead(self) -> Tensor:
        """1 where the bias is −∞, else 0."""
        return (self.bias == -torch.inf).to(self.bias.dtype)

    @classmethod
    def build(cls, columns: list[Tensor], values: list[Tensor], heads: tuple[int, int]) -> _Side | None:
        """Pad arms to one width by repeating their last column with its own bias, so that equal writes coincide."""
        width = max(part.numel() for part in columns)
        if width == 0:
            return None
        index = torch.zeros(len(columns), width, dtype=torch.int64, device=columns[0].device)
        real = torch.zeros(index.shape, dtype=torch.bool, device=index.device)
        t = max(value.shape[1] for value in values if value.dim() > 1)
        bias = torch.zeros(len(columns), heads[0] * heads[1], t, width, device=index.device)
        for arm, (part, value) in enumerate(zip(columns, values, strict=True)):
            if part.numel():
                count = part.numel()
                index[arm, :count], index[arm, count:] = part, part[-1]
                bias[arm, ..., :count], bias[arm, ..., count:] = value, value[..., -1:]
                real[arm, :count] = True
        same = bool((bias == bias[:, :1]).all())
        bias = bias[:, :1, None] if same else bias.unflatten(1, heads)
        return cls(index, bias, real)

    def at(self, part: Tensor) -> Tensor:
        """The entries of logits (or weights) [b, K, G, t, ·] that the biases name, [b, K, G, t, C]."""
        return part.gather(-1, self._spread(part))

    def add(self, part: Tensor, raw: Tensor) -> None:
        """Write raw + bias back in place."""
        part.scatter_(-1, self._spread(part), raw + self.bias)

    def _spread(self, part: Tensor) -> Tensor:
        return self.index[:, None, None, None].expand(*part.shape[:-1], -1)


@dataclass(frozen=True)
class ChunkBias:
    """All biases of one chunk of arms and rows, gathered so that each layer applies them in a few operations."""

    far: _Side | None
    near: _Side | None
    arms: int

    @classmethod
    def build(
        cls,
        biases: Mapping[int, KeyBias],
        arms: int,
        positions: Tensor,
        prefix_length: int,
        low: int,
        near_low: int,
        heads: tuple[int, int],
    ) -> ChunkBias:
        """Split each arm's columns between prefix and own keys, in the coordinates of this chunk."""
        nothing = torch.zeros(0, dtype=torch.int64, device=positions.device)
        columns: dict[str, list[Tensor]] = {"far": [nothing] * arms, "near": [nothing] * arms}
        values: dict[str, list[Tensor]] = {"far": [nothing] * arms, "near": [nothing] * arms}
        for arm, bias in biases.items():
            at = bias.columns.to(positions.device)
            every = bias.at(positions)
            reach = (at >= low) & (at <= positions[-1])
            for side, chosen, origin in (("far", at < prefix_length, low), ("near", at >= prefix_length, near_low)):
                columns[side][arm] = at[reach & chosen] - origin
                values[side][arm] = every[..., reach & chosen]
        sides = [_Side.build(columns[side], values[side], heads) for side in ("far", "near")]
        return cls(sides[0], sides[1], arms)

    def _pairs(self, far: Tensor | None, near: Tensor) -> list[tuple[_Side, Tensor]]:
        both = ((self.far, None if far is None else far.transpose(0, 1)), (self.near, near))
        return [(side, part) for side, part in both if side is not None and part is not None]

    def apply(self, far: Tensor | None, near: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add the biases in place; returns what that loses and the visible cells met [b].

        The loss is Σ_S (1 − e^bias) e^{s − peak}, with its peak, each [b, K, G, t].
        """
        met = []
        for side, part in self._pairs(far, near):
            raw = side.at(part)
            side.add(part, raw)
            landed = side.at(part) == raw + side.bias  # read back: what was not written is not met
            met.append((raw, side.loss, landed.logical_and_(side.met)))
        peak = near.new_full(near.shape[:-1], -torch.inf)
        for raw, _, _ in met:
            peak = torch.maximum(peak, raw.amax(-1))
        peak = peak.masked_fill(peak == -torch.inf, 0.0)
        lost, cells = torch.zeros_like(peak), torch.zeros(self.arms, dtype=torch.int64, device=near.device)
        for raw, loss, landed in met:
            cells += torch.count_nonzero(landed.logical_and_(raw > -torch.inf).flatten(1), 1)
            lost = lost + raw.sub_(peak[..., None]).exp_().mul_(loss).sum(-1)
        return peak, lost, cells

    def dead_weight(self, far: Tensor | None, near: Tensor) -> Tensor:
        """Largest weight on a key with bias −∞, per arm [b]."""
        worst = near.new_zeros(self.arms)
        for side, part in self._pairs(far, near):
            worst = torch.maximum(worst, side.at(part).abs_().mul_(side.dead).flatten(1).amax(1))
        return worst

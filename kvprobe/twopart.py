"""Exact attention over a shared prefix and each arm's own keys, with biases: the arithmetic of one layer.

Equal to the slow line

    ``softmax(scale · q [K_prefix ; K_own]ᵀ (soft-capped) + visibility + bias) [V_prefix ; V_own]``

without ever concatenating, repeating or copying the prefix: B arms × G heads × t queries meet the prefix's keys in one
matrix product per kv head. Logits, exponentials and sums are fp32 whatever the model's dtype. A row without a key left
gives 0, never NaN; visibility comes from positions alone, so that no mask can uncover a later token.

Shapes: B arms, H query heads, K kv heads, G = H // K, t new queries, p prefix length, m own keys (m ≥ t), d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerSpec:
    """What a layer's attention told us about itself: scale, window, soft-cap and learned sink logits [H]."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sink: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True where an ordinary softmax over all earlier keys is exact."""
        return self.window is None and self.softcap is None and self.sink is None


class KeyBias(Protocol):
    """The additive bias of one arm at one layer (see :mod:`kvprobe.interventions.plan`)."""

    @property
    def columns(self) -> Tensor:
        """Sorted absolute key positions that the bias can touch, [C]."""
        ...

    def at(self, positions: Tensor) -> Tensor:
        """Bias [H or 1, t or 1, C] ≤ 0 for queries at these absolute positions; 1 where they are all alike."""
        ...


@dataclass
class LayerRecord:
    """What one layer did to one batch of arms: the raw material of a receipt."""

    retained: Tensor  # [B, H, T] kept share R of every row's own unmasked softmax, 1 where nothing was masked
    masked_weight: Tensor  # [B] largest weight found on a key with bias −∞, after the softmax that was used
    reached: Tensor  # [B] number of (head, query, key) cells that a bias met and that were visible


def chunks(batch: int, t: int, row_bytes: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Arms × query rows whose logits fit ``limit`` bytes (at least 16 rows, so that products stay products)."""
    rows = max(16, limit // max(row_bytes, 1))
    arms, step = (max(1, rows // t), t) if rows >= t else (1, rows)
    for first in range(0, batch, arms):
        for row in range(0, t, step):
            yield slice(first, min(first + arms, batch)), slice(row, min(row + step, t))


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    """c · tanh(logits / c) in place, or logits unchanged without a soft-cap."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def layer_logits(query: Tensor, key: Tensor, spec: LayerSpec, positions: Tensor) -> Tensor:
    """fp32 logits [H, Q, n] of query rows [H, Q, d] at absolute ``positions`` over keys [K, n, d]; −∞ where invisible.

    The slow line: ``cap(scale · q kᵀ)``, then −∞ on keys after the query and outside its window.
    """
    kv_heads, n, d = key.shape
    grouped = (query.float() * spec.scale).reshape(kv_heads, -1, d)
    logits = torch.bmm(grouped, key.float().transpose(1, 2)).view(query.shape[0], query.shape[1], n)
    logits = cap(logits, spec.softcap)
    keys = torch.arange(n, device=key.device)
    return logits.masked_fill_(~visible(positions.to(key.device), keys, spec.window), -torch.inf)


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Boolean [t, n]: key ≤ query, and query − key < window (a window counts the query itself)."""
    ahead = queries[:, None] - keys[None, :]
    seen = ahead >= 0
    return seen if window is None else seen & (ahead < window)


class Parts:
    """One layer's operands: fp32 prefix and own keys and values, and the arithmetic of one chunk."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
        spec: LayerSpec,
        prefix_length: int,
    ) -> None:
        self.query, self.spec, self.prefix_length = query, spec, prefix_length
        self.key, self.value = key.float(), value.float()
        self.prefix = None if prefix is None else (prefix[0].float(), prefix[1].float())
        self.kv_heads = key.shape[1]
        self.group = query.shape[1] // self.kv_heads
        # Absolute position of query row 0: own keys end where the queries end.
        self.first = prefix_length + key.shape[2] - query.shape[2]

    def attend(
        self,
        b: slice,
        rows: slice,
        biases: Mapping[int, KeyBias],
        record: LayerRecord,
        prepared: dict[Any, ChunkBias],
    ) -> Tensor:
        """z [b, t, H, d_v] of one chunk of arms and rows; its share of the receipt goes to ``record``."""
        positions = torch.arange(self.first + rows.start, self.first + rows.stop, device=self.query.device)
        first, last = self.first + rows.start, self.first + rows.stop - 1
        low = 0 if self.spec.window is None else max(0, first - self.spec.window + 1)
        near_low = max(low, self.prefix_length)
        q = self.query[b, :, rows].float() * self.spec.scale
        q = q.unflatten(1, (self.kv_heads, self.group))  # [b, K, G, t, d]
        far = self._far(q, low, positions, last)
        near = self._near(q, b, near_low, positions, last)
        if not biases:
            return self._softmax(q, b, far, near, low, near_low)[0]
        key = (tuple(sorted((arm, id(bias)) for arm, bias in biases.items())), first, last, low)
        if key not in prepared:
            heads = (self.kv_heads, self.group)
            prepared[key] = ChunkBias.build(biases, q.shape[0], positions, self.prefix_length, low, near_low, heads)
        bias = prepared[key]
        peak, lost, cells = bias.apply(far, near)
        z, top, kept = self._softmax(q, b, far, near, low, near_low)
        # R = Σ_kept / Σ_all = sigmoid(ln Σ_kept − ln Σ_lost): a sum over kept keys, never 1 − a_S. The two peaks are
        # subtracted from each other first: beside logits of 1e5 the logarithm of a sum would have lost its digits.
        share = torch.sigmoid((top - peak) + (kept.log() - lost.log()))
        record.retained[b, :, rows] = share.flatten(1, 2)
        record.masked_weight[b] = torch.maximum(record.masked_weight[b], bias.dead_weight(far, near))
        record.reached[b] += cells
        return z

    def _far(self, q: Tensor, low: int, positions: Tensor, last: int) -> Tensor | None:
        """Logits over the prefix, [K, b, G, t, p − low]: every arm's rows in one product per kv head."""
        if self.prefix is None or low >= self.prefix_length:
            return None
        keys = self.prefix[0][:, low:]
        flat = q.transpose(0, 1).reshape(self.kv_heads, -1, q.shape[-1])
        logits = torch.bmm(flat, keys.transpose(1, 2))
        logits = cap(logits, self.spec.softcap).view(self.kv_heads, q.shape[0], self.group, q.shape[3], -1)
        if self.spec.window is not None and last - low >= self.spec.window:
            at = torch.arange(low, self.prefix_length, device=q.device)
            logits.masked_fill_(~visible(positions, at, self.spec.window), -torch.inf)
        return logits

    def _near(self, q: Tensor, b: slice, near_low: int, positions: Tensor, last: int) -> Tensor:
        """Logits over each arm's own keys from ``near_low`` up to the last query, [b, K, G, t, m′]."""
        keys = self.key[b, :, near_low - self.prefix_length : last + 1 - self.prefix_length]
        logits = torch.matmul(q.flatten(2, 3), keys.transpose(-1, -2))
        logits = cap(logits, self.spec.softcap).unflatten(2, (self.group, -1))
        if len(positions) > 1 or self.spec.window is not None:
            at = torch.arange(near_low, last + 1, device=q.device)
            logits.masked_fill_(~visible(positions, at, self.spec.window), -torch.inf)
        return logits

    def _softmax(
        self, q: Tensor, b: slice, far: Tensor | None, near: Tensor, low: int, near_low: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weights e^{s − top} in place of logits s; returns z [b, t, H, d_v], top and the weights' sum [b, K, G, t]."""
        top = near.amax(-1)
        if far is not None:
            top = torch.maximum(top, far.amax(-1).transpose(0, 1))
        sink = self.spec.sink
        if sink is not None:
            sink = sink.float().view(1, self.kv_heads, self.group, 1)
            top = torch.maximum(top, sink)
        top = top.masked_fill(top == -torch.inf, 0.0)  # a silenced row: every weight becomes exactly 0
        total = near.sub_(top[..., None]).exp_().sum(-1)
        values = self.value[b, :, near_low - self.prefix_length :][:, :, : near.shape[-1]]
        z = torch.matmul(near.flatten(2, 3), values).unflatten(2, (self.group, -1))  # [b, K, G, t, d_v]
        if far is not None and self.prefix is not None:
            total = total + far.sub_(top.transpose(0, 1)[..., None]).exp_().sum(-1).transpose(0, 1)
            flat = torch.bmm(far.flatten(1, 3), self.prefix[1][:, low:])
            z = z + flat.view(self.kv_heads, z.shape[0], *z.shape[2:]).transpose(0, 1)
        if sink is not None:
            total = total + (sink - top).exp()
        z = z / torch.where(total > 0, total, torch.ones_like(total))[..., None]
        return z.flatten(1, 2).transpose(1, 2), top, total


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

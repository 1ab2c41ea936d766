"""Exact attention over a shared prefix and each arm's own keys, with biases: the arithmetic of one layer.

Equal to the slow line

    ``softmax(scale · q [K_prefix ; K_own]ᵀ (soft-capped) + visibility + bias) [V_prefix ; V_own]``

without ever concatenating, repeating or copying the prefix: B arms × G heads × t queries meet the prefix's keys in one
matrix product per kv head. Logits, exponentials and sums are fp32 whatever the model's dtype. A row without a key left
gives 0, never NaN; visibility comes from positions alone, so that no mask can uncover a later token.

Shapes: B arms, H query heads, K kv heads, G = H // K, t new queries, p prefix length, m own keys (m ≥ t), d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvprobe.chunkbias import ChunkBias, KeyBias
from kvprobe.layerspec import CellEdit, LayerRecord, LayerSpec, View

__all__ = [
    "CellEdit",
    "ChunkBias",
    "KeyBias",
    "LayerRecord",
    "LayerSpec",
    "Parts",
    "View",
    "cap",
    "chunks",
    "layer_logits",
    "visible",
]


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
        edits: Mapping[int, Sequence[CellEdit]] | None = None,
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
        views = {
            arm: (self._view(arm, q, b, far, near, positions, low, near_low), some)
            for arm, some in (edits or {}).items()
        }
        for arm, (view, some) in views.items():
            for edit in some:
                _count(record, b.start + arm, edit.site, edit.on_logits(view))
        if not biases:
            return self._softmax(b, far, near, low, near_low, views, record)[0]
        same = tuple(sorted((arm, id(bias)) for arm, bias in biases.items()))
        key = (same, first, last, low, positions.device)  # layers may lie on several devices
        if key not in prepared:
            heads = (self.kv_heads, self.group)
            prepared[key] = ChunkBias.build(biases, q.shape[0], positions, self.prefix_length, low, near_low, heads)
        bias = prepared[key]
        peak, lost, cells = bias.apply(far, near)
        z, top, kept = self._softmax(b, far, near, low, near_low, views, record)
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

    def _view(
        self,
        arm: int,
        q: Tensor,
        b: slice,
        far: Tensor | None,
        near: Tensor,
        positions: Tensor,
        low: int,
        near_low: int,
    ) -> View:
        own = self.value[b.start + arm, :, near_low - self.prefix_length :][:, : near.shape[-1]]
        shared = None if self.prefix is None else self.prefix[1][:, low:]
        mine = None if far is None else far[:, arm]
        return View(q[arm], mine, near[arm], shared, own, positions, low, near_low, self.prefix_length, self.spec)

    def _softmax(
        self,
        b: slice,
        far: Tensor | None,
        near: Tensor,
        low: int,
        near_low: int,
        views: Mapping[int, tuple[View, Sequence[CellEdit]]],
        record: LayerRecord,
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
        if far is not None:
            total = total + far.sub_(top.transpose(0, 1)[..., None]).exp_().sum(-1).transpose(0, 1)
        for arm, (view, some) in views.items():
            for edit in some:
                _count(record, b.start + arm, edit.site, edit.on_weights(view))
        values = self.value[b, :, near_low - self.prefix_length :][:, :, : near.shape[-1]]
        z = torch.matmul(near.flatten(2, 3), values).unflatten(2, (self.group, -1))  # [b, K, G, t, d_v]
        if far is not None and self.prefix is not None:
            flat = torch.bmm(far.flatten(1, 3), self.prefix[1][:, low:])
            z = z + flat.view(self.kv_heads, z.shape[0], *z.shape[2:]).transpose(0, 1)
        for arm, (view, some) in views.items():
            for edit in some:
                _count(record, b.start + arm, edit.site, edit.on_values(view, z[arm]))
        if sink is not None:
            total = total + (sink - top).exp()
        z = z / torch.where(total > 0, total, torch.ones_like(total))[..., None]
        return z.flatten(1, 2).transpose(1, 2), top, total


def _count(record: LayerRecord, arm: int, site: str, cells: int) -> None:
    record.edited[arm, site] = record.edited.get((arm, site), 0) + cells

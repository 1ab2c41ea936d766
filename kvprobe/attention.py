"""The attention that runs inside the twin: exact, mask-aware, and shared-prefix.

transformers lets a model call any function registered with its ``AttentionInterface``. kvprobe registers one, so that
every class which dispatches its attention there hands over rotated queries, keys and values *before* the softmax,
together with its scale, window, soft-cap and learned sinks. What happens then depends on the active :class:`Run`:

* no run: the plain SDPA call of transformers (a twin in a user's hands behaves as any transformers model);
* a run without masks or prefix: SDPA again, with the query rows that were asked for put aside;
* anything else: the two-part attention below, which equals the slow line

  ``softmax(scale · q [K_prefix ; K_own]ᵀ (soft-capped) + visibility + bias) [V_prefix ; V_own]``

  without ever concatenating, repeating or copying the prefix: B arms × G heads × t queries meet the prefix's keys in one
  matrix product per kv head. Logits, exponentials and sums are fp32 whatever the model's dtype.

Shapes: B arms, H query heads, K kv heads, G = H // K, t new queries, p prefix length, m own keys (m ≥ t), d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kvprobe.errors import InterventionError, ModelError

NAME = "kvprobe"
"""The name under which the function is registered with transformers."""

CHUNK_BYTES = {"cpu": 4 << 20, "default": 256 << 20}
"""Logits held at once. On CPU the chunk is sized to the second-level cache: the softmax passes then never see DRAM."""


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

    columns: Tensor  # [C] sorted absolute key positions that the bias can touch

    def at(self, positions: Tensor) -> Tensor:
        """Bias [H or 1, t, C] ≤ 0 for queries at these absolute positions."""
        ...


@dataclass
class LayerRecord:
    """What one layer did to one batch of arms: the raw material of a receipt."""

    retained: Tensor  # [B, H, T] kept share R of every row's own unmasked softmax, 1 where nothing was masked
    masked_weight: Tensor  # [B] largest weight found on a key with bias −∞, after the softmax that was used
    reached: Tensor  # [B] number of (head, query, key) cells that a bias met and that were visible


@dataclass
class Run:
    """One forward pass of the twin, as the attention function needs to know it.

    Attributes
    ----------
    prefix
        Per-layer (keys, values) [K, p, d] shared by all arms, or None.
    start
        Absolute position of the first new query.
    biases
        layer → {arm → KeyBias}.
    capture
        Indices (into this pass' queries) of the query rows to keep, or None.
    """

    prefix: list[tuple[Tensor, Tensor]] | None = None
    start: int = 0
    biases: Mapping[int, Mapping[int, KeyBias]] = field(default_factory=dict)
    capture: Tensor | None = None
    queries: dict[int, Tensor] = field(default_factory=dict)
    specs: dict[int, LayerSpec] = field(default_factory=dict)
    records: dict[int, LayerRecord] = field(default_factory=dict)
    outputs: dict[int, Tensor] | None = None
    prepared: dict[Any, _ChunkBias] = field(default_factory=dict, repr=False)

    @property
    def prefix_length(self) -> int:
        """Number of shared keys p."""
        return 0 if self.prefix is None else self.prefix[0][0].shape[1]


_ACTIVE: ContextVar[Run | None] = ContextVar("kvprobe_run", default=None)


@contextmanager
def active(run: Run) -> Iterator[Run]:
    """Make ``run`` the one that the twin's attention serves; always undone, also on exceptions."""
    token = _ACTIVE.set(run)
    try:
        yield run
    finally:
        _ACTIVE.reset(token)


def register() -> None:
    """Register the function and its mask maker with transformers (idempotent; adds one name, replaces none)."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask inside a run (visibility comes from positions); outside, transformers' own boolean SDPA mask."""
    if _ACTIVE.get() is not None:
        return None
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **kwargs)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, H, t, d], key and value [B, K, m, d] → ([B, t, H, d], None)."""
    spec = LayerSpec(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    run = _ACTIVE.get()
    if run is None:
        return _outside(module, query, key, value, attention_mask, spec, dropout, kwargs), None
    if kwargs.get("position_bias") is not None:
        raise ModelError(f"{type(module).__name__} adds a position bias inside attention; kvprobe cannot mask it exactly")
    layer = int(module.layer_idx)
    run.specs[layer] = spec
    if run.capture is not None:
        run.queries[layer] = query[:, :, run.capture.to(query.device)]
    arms = run.biases.get(layer, {})
    whole = run.prefix is None and key.shape[2] == query.shape[2]
    if whole and spec.plain and not arms:
        out = _sdpa(module, query, key, value, None, spec, dropout)
    else:
        out = _two_part(query, key, value, spec, run, layer, arms)
    if run.outputs is not None:
        run.outputs[layer] = out
    return out, None


def _sdpa(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: LayerSpec, dropout: float) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, q, k, v, mask, dropout=dropout, scaling=spec.scale)[0]


def _outside(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    spec: LayerSpec,
    dropout: float,
    kwargs: Mapping[str, Any],
) -> Tensor:
    """A call that no run of ours started: what transformers itself would compute, soft-cap and sinks included."""
    if spec.softcap is None and spec.sink is None and kwargs.get("position_bias") is None:
        return _sdpa(module, q, k, v, mask, spec, dropout)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = _cap(q.float() @ k.float().transpose(-1, -2) * spec.scale, spec.softcap)
    if mask is None:
        visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        logits = logits.masked_fill(~visible, -torch.inf)
    else:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if spec.sink is not None:
        sink = spec.sink.float().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return (weights.to(v.dtype) @ v).transpose(1, 2).contiguous()


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def layer_logits(query: Tensor, key: Tensor, spec: LayerSpec, positions: Tensor) -> Tensor:
    """fp32 logits [H, Q, n] of query rows [H, Q, d] at absolute ``positions`` over keys [K, n, d]; −∞ where invisible.

    The slow line: ``cap(scale · q kᵀ)``, then −∞ on keys after the query and outside its window.
    """
    kv_heads, n, d = key.shape
    grouped = (query.float() * spec.scale).reshape(kv_heads, -1, d)
    logits = torch.bmm(grouped, key.float().transpose(1, 2)).view(query.shape[0], query.shape[1], n)
    logits = _cap(logits, spec.softcap)
    keys = torch.arange(n, device=key.device)
    return logits.masked_fill_(~visible(positions.to(key.device), keys, spec.window), -torch.inf)


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Boolean [t, n]: key ≤ query, and query − key < window (a window counts the query itself)."""
    ahead = queries[:, None] - keys[None, :]
    seen = ahead >= 0
    return seen if window is None else seen & (ahead < window)


def _two_part(
    query: Tensor, key: Tensor, value: Tensor, spec: LayerSpec, run: Run, layer: int, arms: Mapping[int, KeyBias]
) -> Tensor:
    """Shared-prefix attention of all arms, chunked over arms and queries; returns [B, t, H, d_v]."""
    batch, heads, t, _ = query.shape
    prefix = None if run.prefix is None else run.prefix[layer]
    part = _Parts(query, key, value, prefix, spec, run.prefix_length)
    out = query.new_empty(batch, t, heads, value.shape[-1])
    record = _blank_record(query, arms)
    limit = CHUNK_BYTES.get(query.device.type, CHUNK_BYTES["default"])
    for b, rows in _chunks(batch, t, heads * (part.prefix_length + key.shape[2]) * 4, limit):
        chosen = {arm - b.start: bias for arm, bias in arms.items() if b.start <= arm < b.stop}
        z = part.attend(b, rows, chosen, record, run.prepared)
        out[b, rows] = z.to(out.dtype)
    if arms:
        run.records[layer] = record
    return out


def _blank_record(query: Tensor, arms: Mapping[int, KeyBias]) -> LayerRecord:
    batch, heads, t, _ = query.shape
    size = (batch, heads, t) if arms else (0, 0, 0)
    zeros = torch.zeros(batch, device=query.device)
    return LayerRecord(torch.ones(size, device=query.device), zeros, zeros.to(torch.int64))


def _chunks(batch: int, t: int, row_bytes: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Arms × query rows whose logits fit ``limit`` bytes (at least 16 rows, so that products stay products)."""
    rows = max(16, limit // max(row_bytes, 1))
    arms, step = (max(1, rows // t), t) if rows >= t else (1, rows)
    for first in range(0, batch, arms):
        for row in range(0, t, step):
            yield slice(first, min(first + arms, batch)), slice(row, min(row + step, t))


class _Parts:
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
        prepared: dict[Any, _ChunkBias],
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
            prepared[key] = _ChunkBias.build(biases, q.shape[0], positions, self.prefix_length, low, near_low, heads)
        bias = prepared[key]
        lost, cells = bias.apply(far, near)
        z, log_total = self._softmax(q, b, far, near, low, near_low)
        # R = Σ_kept / Σ_all = sigmoid(ln Σ_kept − ln Σ_lost): a sum over kept keys, never 1 − a_S.
        share = torch.sigmoid(log_total - lost).masked_fill(lost == -torch.inf, 1.0)
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
        logits = _cap(logits, self.spec.softcap).view(self.kv_heads, q.shape[0], self.group, q.shape[3], -1)
        if self.spec.window is not None and last - low >= self.spec.window:
            at = torch.arange(low, self.prefix_length, device=q.device)
            logits.masked_fill_(~visible(positions, at, self.spec.window), -torch.inf)
        return logits

    def _near(self, q: Tensor, b: slice, near_low: int, positions: Tensor, last: int) -> Tensor:
        """Logits over each arm's own keys from ``near_low`` up to the last query, [b, K, G, t, m′]."""
        keys = self.key[b, :, near_low - self.prefix_length : last + 1 - self.prefix_length]
        logits = torch.matmul(q.flatten(2, 3), keys.transpose(-1, -2))
        logits = _cap(logits, self.spec.softcap).unflatten(2, (self.group, -1))
        if len(positions) > 1 or self.spec.window is not None:
            at = torch.arange(near_low, last + 1, device=q.device)
            logits.masked_fill_(~visible(positions, at, self.spec.window), -torch.inf)
        return logits

    def _softmax(
        self, q: Tensor, b: slice, far: Tensor | None, near: Tensor, low: int, near_low: int
    ) -> tuple[Tensor, Tensor]:
        """Unnormalised weights in place of logits; returns z [b, t, H, d_v] and the log-normaliser [b, K, G, t]."""
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
        return z.flatten(1, 2).transpose(1, 2), top + total.log()


@dataclass(frozen=True)
class _Side:
    """Where a chunk's biases fall in one part of the logits: index [b, C], bias [b, K, G, t, C], real entries [b, C]."""

    index: Tensor
    bias: Tensor
    real: Tensor

    @classmethod
    def build(cls, columns: list[Tensor], values: list[Tensor], heads: tuple[int, int], t: int) -> _Side | None:
        """Pad arms to one width by repeating their last column with its own bias, so that equal writes coincide."""
        width = max(part.numel() for part in columns)
        if width == 0:
            return None
        index = torch.zeros(len(columns), width, dtype=torch.int64, device=columns[0].device)
        real = torch.zeros(index.shape, dtype=torch.bool, device=index.device)
        bias = torch.zeros(len(columns), heads[0] * heads[1], t, width, device=index.device)
        for arm, (part, value) in enumerate(zip(columns, values, strict=True)):
            if part.numel():
                count = part.numel()
                index[arm, :count], index[arm, count:] = part, part[-1]
                bias[arm, ..., :count], bias[arm, ..., count:] = value, value[..., -1:]
                real[arm, :count] = True
        bias = bias[:, :1, None] if _same_heads(bias) else bias.unflatten(1, heads)
        return cls(index, bias, real)

    def at(self, part: Tensor) -> Tensor:
        """The entries of logits (or weights) [b, K, G, t, ·] that the biases name, [b, K, G, t, C]."""
        return part.gather(-1, self._spread(part))

    def add(self, part: Tensor, raw: Tensor) -> None:
        """Write raw + bias back in place."""
        part.scatter_(-1, self._spread(part), raw + self.bias)

    def _spread(self, part: Tensor) -> Tensor:
        return self.index[:, None, None, None].expand(*part.shape[:-1], -1)


def _same_heads(bias: Tensor) -> bool:
    return bool((bias == bias[:, :1]).all())


@dataclass(frozen=True)
class _ChunkBias:
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
    ) -> _ChunkBias:
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
        t = len(positions)
        sides = [_Side.build(columns[side], values[side], heads, t) for side in ("far", "near")]
        return cls(sides[0], sides[1], arms)

    def _pairs(self, far: Tensor | None, near: Tensor) -> list[tuple[_Side, Tensor]]:
        pairs = []
        if self.far is not None and far is not None:
            pairs.append((self.far, far.transpose(0, 1)))
        if self.near is not None:
            pairs.append((self.near, near))
        return pairs

    def apply(self, far: Tensor | None, near: Tensor) -> tuple[Tensor, Tensor]:
        """Add the biases in place; returns ln Σ_S (1 − e^bias) e^s [b, K, G, t] and the visible cells met [b]."""
        lost = near.new_full(near.shape[:-1], -torch.inf)
        cells = torch.zeros(self.arms, dtype=torch.int64, device=near.device)
        for side, part in self._pairs(far, near):
            raw = side.at(part)
            real = side.real[:, None, None, None]
            weight = torch.log1p(-side.bias.exp()).masked_fill(~real, -torch.inf)
            lost = torch.logaddexp(lost, torch.logsumexp(raw + weight, -1))
            cells += ((raw > -torch.inf) & (side.bias < 0) & real).flatten(1).sum(1)
            side.add(part, raw)
        return lost, cells

    def dead_weight(self, far: Tensor | None, near: Tensor) -> Tensor:
        """Largest weight on a key with bias −∞, per arm [b]."""
        worst = near.new_zeros(self.arms)
        for side, part in self._pairs(far, near):
            dead = side.at(part).abs() * (side.bias == -torch.inf)
            worst = torch.maximum(worst, dead.flatten(1).amax(1))
        return worst

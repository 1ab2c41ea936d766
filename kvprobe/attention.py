"""The attention that runs inside the twin: exact, mask-aware, and shared-prefix.

transformers lets a model call any function registered with its ``AttentionInterface``. kvprobe registers one, so that
every class which dispatches its attention there hands over rotated queries, keys and values *before* the softmax,
together with its scale, window, soft-cap and learned sinks. What happens then depends on the active :class:`Run`:

* no run: the plain SDPA call of transformers (a twin in a user's hands behaves as any transformers model);
* a run without masks or prefix: SDPA again, with the query rows that were asked for put aside (a later chunk of the
  same prompt included);
* anything else: the two-part attention of :mod:`kvprobe.twopart`, which never copies the shared prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvprobe.chunkbias import ChunkBias, KeyBias
from kvprobe.errors import ModelError
from kvprobe.layerspec import CellEdit, LayerRecord, LayerSpec
from kvprobe.twopart import Parts, cap, chunks, visible

NAME = "kvprobe"
"""The name under which the function is registered with transformers."""

CHUNK_BYTES = {"cpu": 8 << 20, "default": 256 << 20}
"""Logits held at once: on CPU small enough that softmax passes stay in the caches, large enough to fill products."""


Observer = Callable[[int, Tensor, Tensor, Tensor, LayerSpec], None]


@dataclass
class Run:
    """One forward pass of the twin, as the attention function needs to know it.

    Attributes
    ----------
    prefix
        Per-layer (keys, values) [K, p, d] shared by all arms, or None. A compacted prefix has p < ``start`` entries;
        then there are no biases and no windows, so that nothing depends on the positions of its entries.
    start
        Absolute position of the first new query.
    biases
        layer → {arm → KeyBias}.
    edits
        layer → {arm → what it does to weights and values, beside biases}.
    capture
        Indices (into this pass' queries) of the query rows to keep, or None.
    observer
        Called on every layer with (layer, query, key, value, spec) before it attends: whoever needs all query rows
        takes what it needs there, so that no layer's rows outlive it.
    reach
        Tokens of the longest pass that made the prefix' keys, where those are more than ``start``.
    limit
        Bytes of logits held at once; None for what suits the device (``CHUNK_BYTES``).
    dry
        Called instead of attending, with (query, key, value, spec): only shapes matter (:mod:`kvprobe.costs` counts
        bytes and FLOPs that way).
    """

    prefix: list[tuple[Tensor, Tensor]] | None = None
    start: int = 0
    biases: Mapping[int, Mapping[int, KeyBias]] = field(default_factory=dict)
    edits: Mapping[int, Mapping[int, Sequence[CellEdit]]] = field(default_factory=dict)
    capture: Tensor | None = None
    observer: Observer | None = None
    reach: int = 0
    limit: int | None = None
    dry: Callable[[Tensor, Tensor, Tensor, LayerSpec], Tensor] | None = None
    queries: dict[int, Tensor] = field(default_factory=dict)
    specs: dict[int, LayerSpec] = field(default_factory=dict)
    records: dict[int, LayerRecord] = field(default_factory=dict)
    outputs: dict[int, Tensor] | None = None
    prepared: dict[Any, ChunkBias] = field(default_factory=dict, repr=False)


_ACTIVE: ContextVar[Run | None] = ContextVar("kvprobe_run", default=None)


@contextmanager
def active(run: Run) -> Iterator[Run]:
    """Make ``run`` the one that the twin's attention serves; always undone, also on exceptions."""
    token = _ACTIVE.set(run)
    try:
        yield run
    finally:
        _ACTIVE.reset(token)


def serving() -> Run | None:
    """The run that the calling thread's passes belong to, if any."""
    return _ACTIVE.get()


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
    spec = LayerSpec(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
        softcap,
        None if s_aux is None else s_aux.detach(),
    )
    run = _ACTIVE.get()
    if run is None:
        return _outside(module, query, key, value, attention_mask, spec, dropout, kwargs), None
    if kwargs.get("position_bias") is not None:
        raise ModelError(
            f"{type(module).__name__} adds a position bias inside attention; kvprobe cannot mask it exactly"
        )
    if attention_mask is not None:  # inside a run transformers' mask makers return None: this one is the class' own
        raise ModelError(
            f"{type(module).__name__} makes an attention mask of its own; allowed: classes whose masks positions and "
            "sliding_window describe"
        )
    layer = int(module.layer_idx)
    run.specs[layer] = spec
    if run.capture is not None:
        run.queries[layer] = query[:, :, run.capture.to(query.device)]
    if run.observer is not None:
        run.observer(layer, query, key, value, spec)
    arms, edits = run.biases.get(layer, {}), run.edits.get(layer, {})
    alone = run.prefix is None and spec.plain and not arms and not edits
    if run.dry is not None:
        out = run.dry(query, key, value, spec)
    elif alone and key.shape[2] == query.shape[2]:
        out = _sdpa(module, query, key, value, None, spec, dropout)
    elif alone and query.shape[2] > 1:
        out = _continued(query, key, value, spec, _limit(run, query))
    else:
        out = _two_part(query, key, value, spec, run, layer, arms, edits)
    if run.outputs is not None:
        run.outputs[layer] = out
    return out, None


def _sdpa(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: LayerSpec, dropout: float) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, q, k, v, mask, dropout=dropout, scaling=spec.scale)[0]


def _continued(query: Tensor, key: Tensor, value: Tensor, spec: LayerSpec, limit: int) -> Tensor:
    """Rows that follow earlier ones of the same pass' cache: SDPA under a mask of t × n at most, a block at a time.

    The heads of a kv head are laid behind one another as rows, so that keys and values are not repeated for them.
    """
    heads, t, group = query.shape[1], query.shape[2], query.shape[1] // key.shape[1]
    out = query.new_empty(query.shape[0], t, heads, value.shape[-1])
    step = max(16, limit // (4 * group * key.shape[2]))
    for row in range(0, t, step):
        q = query[:, :, row : row + step]
        last = key.shape[2] - t + row + q.shape[2]
        at = torch.arange(last, device=query.device)
        mask = visible(at[-q.shape[2] :], at, None).repeat(group, 1)
        packed = q.unflatten(1, (-1, group)).flatten(2, 3)
        z = torch.nn.functional.scaled_dot_product_attention(
            packed, key[:, :, :last], value[:, :, :last], attn_mask=mask, scale=spec.scale
        )
        out[:, row : row + step] = z.unflatten(2, (group, -1)).flatten(1, 2).transpose(1, 2)
    return out


def _limit(run: Run, query: Tensor) -> int:
    """Bytes of logits that this run may hold at once."""
    return CHUNK_BYTES.get(query.device.type, CHUNK_BYTES["default"]) if run.limit is None else run.limit


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
    logits = cap(q.float() @ k.float().transpose(-1, -2) * spec.scale, spec.softcap)
    if mask is None:
        visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        logits = logits.masked_fill(~visible, -torch.inf)
    else:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if spec.sink is not None:
        sink = spec.sink.float().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
    else:
        blind = (logits == -torch.inf).all(-1, keepdim=True)  # a left pad sees nothing: 0 as in SDPA, never NaN
        weights = logits.softmax(-1).masked_fill(blind, 0.0)
    return (weights.to(v.dtype) @ v).transpose(1, 2).contiguous()


def _two_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: LayerSpec,
    run: Run,
    layer: int,
    arms: Mapping[int, KeyBias],
    edits: Mapping[int, Sequence[CellEdit]],
) -> Tensor:
    """Shared-prefix attention of all arms, chunked over arms and queries; returns [B, t, H, d_v]."""
    batch, heads, t, _ = query.shape
    prefix = None if run.prefix is None else run.prefix[layer]
    # A compacted prefix holds fewer entries than positions, and not the same number on every layer.
    part = Parts(query, key, value, prefix, spec, 0 if prefix is None else prefix[0].shape[1])
    out = query.new_empty(batch, t, heads, value.shape[-1])
    record = _blank_record(query, bool(arms))
    row_bytes = heads * (part.prefix_length + key.shape[2]) * 4
    for b, rows in chunks(batch, t, row_bytes, _limit(run, query)):
        chosen = {arm - b.start: bias for arm, bias in arms.items() if b.start <= arm < b.stop}
        more = {arm - b.start: some for arm, some in edits.items() if b.start <= arm < b.stop}
        z = part.attend(b, rows, chosen, record, run.prepared, more)
        out[b, rows] = z.to(out.dtype)
    if arms or edits:
        run.records[layer] = record
    return out


def _blank_record(query: Tensor, arms: bool) -> LayerRecord:
    batch, heads, t, _ = query.shape
    size = (batch, heads, t) if arms else (0, 0, 0)
    zeros = torch.zeros(batch, device=query.device)
    return LayerRecord(torch.ones(size, device=query.device), zeros, zeros.to(torch.int64))

"""One forward pass of the twin under a :class:`~kvprobe.attention.Run`, and the prefix that runs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvprobe.attention import Observer, Run, active
from kvprobe.errors import CapabilityError, ModelError
from kvprobe.projections import NAMES
from kvprobe.projections import output_bias as output_bias
from kvprobe.projections import output_weights as output_weights
from kvprobe.sizes import UNLIMITED, Limits


@dataclass(frozen=True)
class Prefix:
    """A prefilled context: per-layer (keys, values), each [K, p, d] and rotated, plus what produced them.

    ``upto(q)`` is a view: many runs share one prefix without copying it.
    """

    ids: Tensor
    layers: list[tuple[Tensor, Tensor]]
    next_logits: Tensor | None = None
    made: int = 0

    @property
    def reach(self) -> int:
        """Tokens of the pass that made these keys: more than there are, where the prefix was cut from a longer one."""
        return max(self.made, len(self))

    def __len__(self) -> int:
        return len(self.ids)

    def upto(self, length: int) -> Prefix:
        """The first ``length`` positions, sharing storage."""
        if not 0 < length <= len(self):
            raise ModelError(f"a prefix of {len(self)} tokens has no first {length} tokens")
        if length == len(self):
            return self
        cut = [(keys[:, :length], values[:, :length]) for keys, values in self.layers]
        return Prefix(self.ids[:length], cut, made=self.reach)

    @property
    def n_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(part.numel() * part.element_size() for pair in self.layers for part in pair)


def new_cache() -> Any:
    """An empty growing cache: full length in every layer, windowed or not, so that positions stay absolute."""
    from transformers import DynamicCache

    return DynamicCache()


def reserved_cache(length: int, n_layers: int) -> Any:
    """A cache with room for ``length`` tokens: pieces of a prompt are written behind one another, where they stay."""
    from transformers import DynamicCache

    cache, rooms = DynamicCache(), (Rooms(n_layers, length), Rooms(n_layers, length))
    cache.layers = [_reserved_layer()(rooms) for _ in range(n_layers)]
    return cache


class Rooms:
    """Room for keys (or values) of all layers, [B, K, length, d] each.

    On the CPU one allocation for all: cached tensors that lie between those of passing layers would leave holes in the
    heap that nothing fits into (up to 600 MiB at 8,192 tokens of the embedded model).
    """

    def __init__(self, n_layers: int, length: int) -> None:
        self.n_layers, self.length = n_layers, length
        self.left: dict[Any, list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """The next layer's room, for tensors like this one."""
        shape = (*like.shape[:2], self.length, like.shape[3])
        if like.device.type != "cpu":
            return like.new_empty(shape)
        kind = (like.dtype, shape)
        if not self.left.get(kind):
            self.left[kind] = list(like.new_empty(self.n_layers, *shape).unbind())
        return self.left[kind].pop(0)


@lru_cache(maxsize=1)
def _reserved_layer() -> Any:
    from transformers.cache_utils import DynamicLayer

    class Reserved(DynamicLayer):
        """Keys and values [B, K, ≤ length, d] as views of one allocation."""

        keys: Tensor
        values: Tensor

        def __init__(self, rooms: tuple[Rooms, Rooms]) -> None:
            super().__init__()
            self.rooms = rooms

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            """Write behind what is there; returns all of it."""
            done = 0 if not self.is_initialized else self.keys.shape[2]
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                states = (key_states, value_states)
                self.room = [rooms.take(each) for rooms, each in zip(self.rooms, states, strict=True)]
            stop = done + key_states.shape[2]
            for room, new in zip(self.room, (key_states, value_states), strict=True):
                room[:, :, done:stop] = new
            self.keys, self.values = (room[:, :, :stop] for room in self.room)
            return self.keys, self.values

    return Reserved


def forward(twin: Any, ids: Tensor, run: Run, cache: Any, keep: int | Tensor = 0) -> Tensor:
    """Logits [B, rows, vocab] of new tokens ids [B, t] that follow the run's prefix and what ``cache`` already holds.

    ``keep`` is transformers' ``logits_to_keep``: 0 for all rows, k for the last k, or row indices. The cache ends up
    holding each arm's own keys only; the shared prefix is read from the run.
    """
    if run.start and (run.prefix is not None or cache.get_seq_length()):
        same_rotation(twin, max(run.reach, run.start), run.start + ids.shape[1])
    device = next(iter(twin.parameters())).device
    positions = torch.arange(run.start, run.start + ids.shape[1], device=device)[None]
    with torch.no_grad(), active(run):
        out = twin(
            input_ids=ids.to(device),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
    return out.logits


def rotation_border(twin: Any) -> tuple[int, bool] | None:
    """(length up to which keys turn as usual, whether they turn alike beyond it) where rotation depends on the length.

    transformers chooses longrope's factors, and dynamic NTK's base, by the longest position of each pass.
    """
    config = twin.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        kind = one.get("rope_type")
        if kind in ("longrope", "dynamic"):
            name = "original_max_position_embeddings"
            known = (one.get(name), getattr(config, name, None)) if kind == "longrope" else ()
            return next((int(n) for n in (*known, config.max_position_embeddings) if n), 0), kind == "longrope"
    return None


def same_rotation(twin: Any, made: int, end: int) -> None:
    """Refuse a pass of ``end`` tokens in all behind keys that a pass of ``made`` tokens has rotated otherwise.

    Raises
    ------
    CapabilityError
        They lie on two sides of the length at which the model's rotation changes.
    """
    border = rotation_border(twin)
    if border is None or (made <= border[0] and end <= border[0]):
        return
    if made != end and not (border[1] and made > border[0] < end):
        raise CapabilityError(
            f"{type(twin).__name__} rotates otherwise in a text of more than {border[0]} tokens: keys of a pass of "
            f"{made} do not serve one of {end}; allowed: passes that all end on one side (no chunk, or a longer one; a "
            "prefix of this very prompt; fewer generated tokens)"
        )


def cached_layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """(keys, values) per layer, [B, K, m, d], of a cache that :func:`forward` filled."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def prefill(
    twin: Any,
    ids: Tensor,
    capture: Tensor | None = None,
    observer: Observer | None = None,
    limits: Limits = UNLIMITED,
) -> tuple[Prefix, Run]:
    """Run ids [n] once by the twin's fastest exact attention; optionally keep the query rows at ``capture``.

    With ``limits.chunk`` the tokens go through in pieces of that many, each behind the cache of those before it: what
    layers need while they work shrinks with the piece. An observer sees all rows of a layer at once, in one piece.
    """
    chunk = len(ids) if limits.chunk is None or observer is not None else limits.chunk
    cache = reserved_cache(len(ids), twin.config.get_text_config().num_hidden_layers)
    rows, done = [], []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        inside = None if capture is None else ((capture >= start) & (capture < start + len(part))).nonzero().flatten()
        at = None if inside is None or capture is None else capture[inside] - start
        run = Run(start=start, capture=at, observer=observer, limit=limits.logits_bytes)
        logits = forward(twin, part[None], run, cache, keep=1)
        if inside is not None:
            rows.append(inside)
        done.append(run.queries)
    run.queries = _in_order(rows, done) if len(done) > 1 else run.queries
    layers = [(keys[0], values[0]) for keys, values in cached_layers(cache)]
    return Prefix(ids, layers, logits[0, -1]), run


def _in_order(rows: Sequence[Tensor], queries: Sequence[dict[int, Tensor]]) -> dict[int, Tensor]:
    """Captured rows of several pieces as one, in the order in which they were asked for."""
    if not rows:
        return {}
    order = torch.cat(list(rows)).argsort()
    return {
        layer: torch.cat([piece[layer] for piece in queries], 2)[:, :, order.to(queries[0][layer].device)]
        for layer in queries[0]
    }


def extend(twin: Any, prefix: Prefix, ids: Tensor) -> Prefix:
    """A prefix with more ids behind it (a copy): only the new tokens are run."""
    run, cache = Run(prefix=prefix.layers, start=len(prefix), reach=prefix.reach), new_cache()
    logits = forward(twin, ids[None], run, cache, keep=1)
    layers = [
        (torch.cat([keys, more[0]], 1), torch.cat([values, further[0]], 1))
        for (keys, values), (more, further) in zip(prefix.layers, cached_layers(cache), strict=True)
    ]
    return Prefix(torch.cat([prefix.ids.to(ids.device), ids]), layers, logits[0, -1], prefix.reach)


def attention_modules(twin: Any, n_layers: int) -> Sequence[Any]:
    """The modules that own the output projections, by layer index."""
    found: dict[int, Any] = {}
    for module in twin.modules():
        index = getattr(module, "layer_idx", None)
        if index is not None and any(hasattr(module, name) for name in NAMES):
            found.setdefault(int(index), module)
    if sorted(found) != list(range(n_layers)):
        raise ModelError(
            f"{type(twin).__name__}: attention modules found for layers {sorted(found)}, expected 0 … {n_layers - 1}"
        )
    return [found[index] for index in range(n_layers)]


def mlp_module(layer: Any) -> Any:
    """The module of a decoder layer whose output is its feed-forward update."""
    for name in ("mlp", "feed_forward", "block_sparse_moe", "ffn"):
        child = getattr(layer, name, None)
        if child is not None:
            return child
    raise ModelError(
        f"{type(layer).__name__} has no feed-forward module that kvprobe knows (mlp, feed_forward, block_sparse_moe, "
        "ffn)"
    )


def end_of_sequence(model: Any) -> frozenset[int]:
    """Token ids that end a text, by the generation settings or else the tokenizer."""
    config = getattr(model.twin, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    ids = ids if ids is not None else model.tokenizer.eos_token_id
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)

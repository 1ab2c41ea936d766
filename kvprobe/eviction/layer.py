"""One layer of a cache as an eviction policy sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvprobe.errors import EvictionError
from kvprobe.twopart import LayerSpec, cap, visible

if TYPE_CHECKING:
    from kvprobe.rotary import Rotary

Granularity = Literal["kv_head", "query_head"]
BLOCK_BYTES = {"cpu": 8 << 20, "default": 256 << 20}
"""Attention weights held at once while rows are averaged or summed."""


@dataclass(frozen=True)
class Layer:
    """Keys, values and the queries that a scorer may look at.

    n entries are ordered by position; the last one belongs to the last token seen. Where heads hold different entries
    (after an earlier eviction) rows are padded on the left: pads have position −1 and are not ``alive``.

    Attributes
    ----------
    index, n_layers
        This layer and how many there are.
    keys, values
        [K, n, d] as cached: keys are rotated.
    w_o
        [H, d, D] the output projection's slice of each query head.
    queries
        [H, q, d] rotated queries of the last q tokens, as many as the scorer asked for.
    spec
        Scale, window, soft-cap and learned sinks of the layer's attention.
    positions
        [K, n] absolute positions of the entries.
    length
        Number of tokens seen so far: the last query stands at ``length − 1``.
    future
        [H, f, d] rotated queries of the tokens that come after, for the oracle only.
    rotary
        The model's rotation, for scorers that asked for it (``needs_rotary``).
    granularity
        What one kept set belongs to: a kv head, or a query head.
    untouched
        Known to be whole, so that nothing need be looked up.
    """

    index: int
    n_layers: int
    keys: Tensor
    values: Tensor
    w_o: Tensor
    queries: Tensor
    spec: LayerSpec
    positions: Tensor
    length: int
    future: Tensor | None = None
    rotary: Rotary | None = None
    granularity: Granularity = "kv_head"
    seed: int = 0
    untouched: bool = False

    @property
    def n(self) -> int:
        """Number of entries a head holds, pads included."""
        return int(self.keys.shape[1])

    @property
    def n_heads(self) -> int:
        """Query heads H."""
        return int(self.w_o.shape[0])

    @property
    def n_kv_heads(self) -> int:
        """Kv heads K."""
        return int(self.keys.shape[0])

    @property
    def group(self) -> int:
        """Query heads per kv head, G = H / K; query head h reads kv head h // G."""
        return self.n_heads // self.n_kv_heads

    @property
    def n_sets(self) -> int:
        """J, the number of kept sets: K, or H at query-head granularity."""
        return self.n_kv_heads if self.granularity == "kv_head" else self.n_heads

    @cached_property
    def alive(self) -> Tensor:
        """Boolean [K, n]: entries that are there."""
        return self.positions >= 0

    @cached_property
    def ragged(self) -> bool:
        """Whether some head has pads."""
        return not self.untouched and not bool(self.alive.all())

    @cached_property
    def whole(self) -> bool:
        """Whether entry i is token i on every head: nothing was evicted before."""
        return self.untouched or (self.n == self.length and not self.ragged)

    def rows(self, count: int) -> Tensor:
        """Rotated queries of the last ``count`` tokens, [H, count, d]."""
        if not 0 < count <= self.queries.shape[1]:
            raise EvictionError(
                f"{count} query rows of {self.queries.shape[1]} observed; allowed: what rows(n) returns"
            )
        return self.queries[:, -count:]

    def attention(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Attention of the last ``count`` queries in blocks of rows: (rows, A [H, rows, n]).

        A = softmax over all visible entries in fp32, learned sinks in the denominator; pads and later tokens have
        exactly 0. A block is bounded, so that no H × count × n tensor exists.
        """
        at = torch.arange(self.length - count, self.length, device=self.keys.device)
        yield from self.attend(self.rows(count), at)

    def attend(self, queries: Tensor, at: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """As :meth:`attention`, for any rotated queries [H, t, d] at absolute positions [t]."""
        limit = BLOCK_BYTES.get(self.keys.device.type, BLOCK_BYTES["default"])
        step = max(1, limit // (4 * self.n_heads * max(self.n, 1)))
        keys = self.keys.float().transpose(1, 2)
        for start in range(0, queries.shape[1], step):
            rows = slice(start, min(start + step, queries.shape[1]))
            # Nobody looks at what comes after a block's last query.
            seen = min(self.n, int(at[rows][-1]) + 1) if self.whole else self.n
            weights = self._weights(queries[:, rows].float(), keys[..., :seen], at[rows])
            yield rows, weights if seen == self.n else functional.pad(weights, (0, self.n - seen))

    def _weights(self, queries: Tensor, keys: Tensor, at: Tensor) -> Tensor:
        grouped = (queries * self.spec.scale).reshape(self.n_kv_heads, -1, queries.shape[-1])
        logits = cap(torch.bmm(grouped, keys), self.spec.softcap).unflatten(1, (self.group, -1))
        logits = logits.masked_fill_(self._hidden(at, keys.shape[-1]), -torch.inf).flatten(0, 1)
        if self.spec.sink is not None:
            sink = self.spec.sink.float().view(-1, 1, 1).expand(*logits.shape[:2], 1)
            return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        blind = (logits == -torch.inf).all(-1, keepdim=True)
        return logits.softmax(-1).masked_fill_(blind, 0.0)

    def _hidden(self, at: Tensor, seen: int) -> Tensor:
        """Boolean [K or 1, 1, t, seen]: entries that these queries cannot see."""
        if self.whole:
            return ~visible(at, self.positions[0, :seen], self.spec.window)[None, None]
        hidden = torch.stack([~visible(at, row, self.spec.window) for row in self.positions])
        return (hidden | ~self.alive[:, None])[:, None]

    def mean_attention(self, count: int) -> Tensor:
        """Mean of the last ``count`` attention rows, [H, n]; the rows' own columns are included."""
        total = torch.zeros(self.n_heads, self.n, device=self.keys.device)
        for _, weights in self.attention(count):
            total += weights.sum(1)
        return total / count

    def per_set(self, scores: Tensor) -> Tensor:
        """Scores [H, n] or [K, n] as [J, n]: a group's mean, or a kv head's score for each of its query heads."""
        if scores.shape[-1] != self.n or scores.shape[0] not in (self.n_heads, self.n_kv_heads):
            raise EvictionError(
                f"scores of shape {list(scores.shape)}; allowed: [{self.n_heads}, {self.n}] per query head or "
                f"[{self.n_kv_heads}, {self.n}] per kv head"
            )
        if scores.shape[0] == self.n_sets:
            return scores
        if self.granularity == "query_head":
            return scores.repeat_interleave(self.group, 0)
        return scores.unflatten(0, (self.n_kv_heads, self.group)).mean(1)

    def at_query_heads(self) -> Layer:
        """The same layer with one kept set per query head."""
        return replace(self, granularity="query_head")

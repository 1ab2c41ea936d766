"""What interventions compile to: rows, cuts of logits and their sum, on a scene of positions.

An *arm* is one counterfactual: a tuple of interventions applied together (the empty tuple is the clean run).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from kvprobe.errors import InterventionError


@dataclass(frozen=True)
class Rows:
    """Which queries an intervention touches: every position ≥ ``first``, or exactly ``positions``."""

    first: int
    positions: tuple[int, ...] | None = None

    def touches(self, queries: Tensor) -> Tensor:
        """Boolean [t] for absolute query positions [t]."""
        if self.positions is None:
            return queries >= self.first
        return torch.isin(queries, torch.tensor(self.positions, device=queries.device))

    def overlap(self, other: Rows) -> bool:
        """Whether some query is touched by both."""
        if self.positions is None:
            return other.positions is None or max(other.positions) >= self.first
        if other.positions is None:
            return other.overlap(self)
        return bool({*self.positions} & {*other.positions})

    def alike(self, positions: Tensor) -> bool:
        """Whether all or none of these queries are touched."""
        touched = self.touches(positions)
        return bool(touched.all()) or not bool(touched.any())

    def meets(self, keys: Tensor, last: Tensor) -> Tensor:
        """Boolean [C]: whether some touched query q has key ≤ q ≤ last, for keys and last queries [C]."""
        if self.positions is None:
            return keys.clamp(min=self.first) <= last
        queries = torch.tensor(sorted(self.positions))
        following = torch.searchsorted(queries, keys)  # the first touched query that is not before the key
        exists = following < len(queries)
        return exists & (queries[following.clamp(max=len(queries) - 1)] <= last)


class Edit(Protocol):
    """One piece of an arm's bias at one layer: some keys of some heads, for some rows."""

    @property
    def rows(self) -> Rows:
        """Queries that are touched."""
        ...

    @property
    def bias(self) -> float:
        """What the logits receive, ≤ 0; −∞ removes."""
        ...

    @property
    def heads(self) -> tuple[int, ...] | None:
        """Query heads that are touched; None for all alike."""
        ...

    @property
    def on_empty(self) -> str:
        """What to do with a row that loses every visible key: raise, zero or keep_self."""
        ...

    @property
    def columns(self) -> Tensor:
        """Sorted absolute key positions that any head loses, [C]."""
        ...

    def alike(self, positions: Tensor) -> bool:
        """Whether queries at all these positions receive the same bias."""
        ...

    def add_to(self, total: Tensor, columns: Tensor, positions: Tensor) -> None:
        """Add the bias of queries at ``positions`` to ``total`` [H or 1, t, C] over ``columns``, in place."""
        ...


@dataclass(frozen=True)
class Cut:
    """One key span [start, stop) × heads × rows that receives ``bias`` (≤ 0) on its logits."""

    start: int
    stop: int
    rows: Rows
    bias: float
    heads: tuple[int, ...] | None = None
    keep_self: bool = False
    on_empty: str = "raise"

    @property
    def columns(self) -> Tensor:
        """The span's positions."""
        return torch.arange(self.start, self.stop)

    def alike(self, positions: Tensor) -> bool:
        """See :class:`Edit`."""
        return not self.keep_self and self.rows.alike(positions)

    def add_to(self, total: Tensor, columns: Tensor, positions: Tensor) -> None:
        """See :class:`Edit`."""
        hit = self.rows.touches(positions)[:, None] & ((columns >= self.start) & (columns < self.stop))[None]
        if self.keep_self:
            hit = hit & (columns[None] != positions[:, None])
        add = torch.zeros(hit.shape, device=positions.device).masked_fill_(hit, self.bias)
        if self.heads is None:
            total += add
        else:
            total[list(self.heads)] += add


@dataclass(frozen=True)
class Scene:
    """What a plan must know of model and run. Positions are absolute and count real tokens only (no left pads).

    ``offset`` left pads come before the n prompt tokens, ``follow`` forced or generated tokens are run after them;
    ``n_kv_heads`` None means one kv head per query head. ``move`` rotates keys [K, C, d] from some positions to others.
    """

    n: int
    suffix: int
    n_layers: int
    n_heads: int
    windows: tuple[int | None, ...]
    has_sink: bool = False
    offset: int = 0
    spans: tuple[tuple[str, tuple[int, int]], ...] = ()
    follow: int = 0
    n_kv_heads: int | None = None
    d_model: int | None = None
    head_dim: int | None = None
    move: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def real(self, start: int, stop: int) -> tuple[int, int]:
        """A span as the user counts (pads included) in real coordinates; out of range is an error."""
        total = self.n + self.offset
        if not self.offset <= start < stop <= total:
            allowed = f"{self.offset} ≤ start < stop ≤ {total}"
            raise InterventionError(f"key span ({start}, {stop}) does not fit the prompt: allowed is {allowed}")
        return start - self.offset, stop - self.offset


class Intervention(Protocol):
    """Anything that compiles to edits of logits, or to effects (:mod:`kvprobe.interventions.effects`)."""

    def cuts(self, layer: int, scene: Scene) -> Sequence[Any]:
        """Edits and effects of one layer, empty where the intervention does not apply."""
        ...

    def check(self, scene: Scene) -> None:
        """Raise an InterventionError if this cannot be applied in the scene."""
        ...


@dataclass(frozen=True)
class ArmBias:
    """The edits of one arm at one layer, as an additive bias on logits."""

    cuts: tuple[Edit, ...]
    n_heads: int

    @cached_property
    def columns(self) -> Tensor:
        """Sorted absolute key positions that any cut names, [C]."""
        return torch.unique(torch.cat([cut.columns for cut in self.cuts]))

    def at(self, positions: Tensor) -> Tensor:
        """Bias [H or 1, t, C] for queries at absolute ``positions``: the sum over cuts, −∞ where any of them is.

        Where every cut treats all these queries alike there is one row for all of them, [H or 1, 1, C].
        """
        if len(positions) > 1 and all(cut.alike(positions) for cut in self.cuts):
            positions = positions[:1]
        columns = self.columns.to(positions.device)
        per_head = any(cut.heads is not None for cut in self.cuts)
        total = torch.zeros(self.n_heads if per_head else 1, len(positions), len(columns), device=positions.device)
        for cut in self.cuts:
            cut.add_to(total, columns, positions)
        return total

"""From interventions to numbers: which keys get which bias, for which queries, heads and layers.

An *arm* is one counterfactual: a tuple of interventions applied together (the empty tuple is the clean run). A
:class:`Plan` holds, for every layer and arm, an :class:`ArmBias`, and knows everything that follows from positions
alone before any compute is spent: the first query that anything touches, rows that would lose every visible key, and
keys that no touched query can see.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

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
    ``n_kv_heads`` None means one kv head per query head.
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

    def real(self, start: int, stop: int) -> tuple[int, int]:
        """A span as the user counts (pads included) in real coordinates; out of range is an error."""
        total = self.n + self.offset
        if not self.offset <= start < stop <= total:
            allowed = f"{self.offset} ≤ start < stop ≤ {total}"
            raise InterventionError(f"key span ({start}, {stop}) does not fit the prompt: allowed is {allowed}")
        return start - self.offset, stop - self.offset


class Intervention(Protocol):
    """Anything that compiles to edits."""

    def cuts(self, layer: int, scene: Scene) -> Sequence[Edit]:
        """Edits of one layer, empty where the intervention does not apply."""
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


@dataclass(frozen=True)
class Plan:
    """Compiled arms: layer → arm → :class:`ArmBias`, plus what positions alone decide."""

    layers: dict[int, dict[int, ArmBias]]
    n_arms: int
    first: tuple[int | None, ...]
    silenced: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    unseen: tuple[dict[int, int], ...] = field(default=())

    def select(self, arms: Sequence[int]) -> dict[int, dict[int, ArmBias]]:
        """The biases of a batch of arms, renumbered 0 … len(arms) − 1."""
        order = {arm: place for place, arm in enumerate(arms)}
        return {
            layer: chosen
            for layer, by_arm in self.layers.items()
            if (chosen := {order[arm]: bias for arm, bias in by_arm.items() if arm in order})
        }


def compile_arms(arms: Sequence[Sequence[Intervention]], scene: Scene) -> Plan:
    """Compile arms for one prompt; raises one clear :class:`InterventionError` before anything is run."""
    layers: dict[int, dict[int, ArmBias]] = {}
    for number, arm in enumerate(arms):
        for part in arm:
            part.check(scene)
        seen: dict[tuple[Edit, ...], ArmBias] = {}  # equal layers share one bias object
        for layer in range(scene.n_layers):
            cuts = tuple(cut for part in arm for cut in part.cuts(layer, scene))
            if cuts:
                layers.setdefault(layer, {})[number] = seen.setdefault(cuts, ArmBias(cuts, scene.n_heads))
    first = tuple(_first(layers, number, scene) for number in range(len(arms)))
    silenced = tuple(tuple(_silenced(layers, number, scene)) for number in range(len(arms)))
    unseen = tuple(_unseen(layers, number, scene) for number in range(len(arms)))
    return Plan(layers, len(arms), first, silenced, unseen)


def _first(layers: dict[int, dict[int, ArmBias]], arm: int, scene: Scene) -> int | None:
    """First query whose attention an arm can change: it must also see the key."""
    cuts = {cut for by_arm in layers.values() if arm in by_arm for cut in by_arm[arm].cuts}
    return min((max(cut.rows.first, int(cut.columns[0])) for cut in cuts), default=None)


def _groups(
    layers: dict[int, dict[int, ArmBias]], arm: int, scene: Scene
) -> Iterable[tuple[list[int], ArmBias, int | None]]:
    """Layers of an arm that share bias and window (all layers of most arms do): each case is worked out once."""
    groups: dict[tuple[int, int | None], tuple[list[int], ArmBias]] = {}
    for layer, by_arm in layers.items():
        if arm in by_arm:
            key = (id(by_arm[arm]), scene.windows[layer])
            groups.setdefault(key, ([], by_arm[arm]))[0].append(layer)
    for (_, window), (numbers, bias) in groups.items():
        yield numbers, bias, window


def _silenced(layers: dict[int, dict[int, ArmBias]], arm: int, scene: Scene) -> Iterable[tuple[int, int, int]]:
    """(layer, head, query) rows left without a single unbiased visible key; queries count pads, as users do.

    A row always sees itself, so only queries whose own key is cut can be silenced: those are looked at one by one.
    With a learned sink no row is ever silenced.
    """
    if scene.has_sink:
        return
    for numbers, bias, window in _groups(layers, arm, scene):
        for query, heads, finite in _full_rows(bias, window, scene):
            if finite or _raises(bias, query, heads):
                what = "gives the same finite bias to" if finite else "removes"
                raise InterventionError(
                    f"the mask {what} every key that query {query + scene.offset} sees (layer {numbers[0]}, "
                    f"head {heads[0]}): there is no attention row left; allowed: keys that leave one key visible, or "
                    "on_empty='zero' (head output 0) or on_empty='keep_self'"
                )
            yield from ((layer, head, query + scene.offset) for layer in numbers for head in heads)


def _raises(bias: ArmBias, query: int, heads: Sequence[int]) -> bool:
    """Whether a cut that took part in silencing these heads at this query refuses silence."""
    at = torch.tensor([query])
    return any(
        cut.on_empty == "raise" and bool(cut.rows.touches(at)) and (cut.heads is None or bool({*heads} & {*cut.heads}))
        for cut in bias.cuts
    )


def _full_rows(bias: ArmBias, window: int | None, scene: Scene) -> Iterable[tuple[int, list[int], bool]]:
    columns = bias.columns
    own = columns[columns < scene.n]
    touched = torch.stack([cut.rows.touches(own) for cut in bias.cuts]).any(0)
    for query in own[touched].tolist():
        low = 0 if window is None else max(0, query - window + 1)
        if int(((columns >= low) & (columns <= query)).sum()) < query - low + 1:
            continue
        values = bias.at(torch.tensor([query]))[:, 0, (columns >= low) & (columns <= query)]
        full = (values < 0).all(-1)
        if not full.any():
            continue
        heads = full.nonzero().flatten().tolist()
        heads = list(range(bias.n_heads)) if values.shape[0] == 1 else heads
        yield query, heads, bool((values[full] > -torch.inf).any())


def _unseen(layers: dict[int, dict[int, ArmBias]], arm: int, scene: Scene) -> dict[int, int]:
    """layer → number of cut keys that no touched query sees (causal order or window): cutting them changes nothing."""
    result: dict[int, int] = {}
    for numbers, bias, window in _groups(layers, arm, scene):
        last = torch.full_like(bias.columns, scene.n + scene.follow - 1)
        if window is not None:
            last = torch.minimum(last, bias.columns + window - 1)
        met = torch.zeros(len(last), dtype=torch.bool)
        for cut in bias.cuts:
            met |= torch.isin(bias.columns, cut.columns) & cut.rows.meets(bias.columns, last)
        hidden = int((~met).sum())
        result.update({layer: hidden for layer in numbers if hidden})
    return result

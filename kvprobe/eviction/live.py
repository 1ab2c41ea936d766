"""A cache that is evicted while it grows: chunk by chunk, or while the model writes.

Two forms of one thing. :class:`LiveCache` keeps every key in memory and removes evicted ones by −∞: exact for ragged
budgets, with a receipt for every pass. :class:`PackedCache` really drops them: smaller and faster, for budgets that are
equal within a layer. Where both apply they agree up to fp32's rounding (which may also decide between tied scores).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from kvprobe import engine, inputs
from kvprobe.attention import Run
from kvprobe.engine import Prefix
from kvprobe.errors import EvictionError
from kvprobe.eviction.layer import Layer
from kvprobe.eviction.policies import Choice, Policy
from kvprobe.interventions.keep import Evicted
from kvprobe.interventions.plan import ArmBias, Plan, Rows
from kvprobe.receipts import Receipt, Step, collect
from kvprobe.rotary import Rotary
from kvprobe.twopart import LayerSpec

EQUAL = ("uniform", "pyramid")
"""Budgets that are equal within a layer."""


class LiveCache:
    """Keys and values of every token fed so far, and which of them each kv head still holds.

    Parameters
    ----------
    model
        A loaded model.
    policy
        Whose scorer will look at the cache: decides how many query rows are remembered.

    Attributes
    ----------
    layers
        Per layer (keys, values), [K, n, d].
    keep
        [L, K, n]: entries that are still there.
    receipts
        One verified receipt for every pass under a mask.
    """

    def __init__(self, model: Any, policy: Policy) -> None:
        check(policy)
        geometry = model.geometry
        self.model, self.policy, self.length = model, policy, 0
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.keep = torch.ones(geometry.n_layers, geometry.n_kv_heads, 0, dtype=torch.bool)
        self.queries: list[Tensor] = []
        self.specs: list[LayerSpec] = []
        self.receipts: list[Receipt] = []
        self.notes: dict[str, Any] = {}
        self.ids = torch.zeros(0, dtype=torch.int64, device=model.device)
        self._rotary = Rotary.of(model) if policy.scorer.needs_rotary else None

    @property
    def n_bytes(self) -> int:
        """Bytes of keys and values in memory."""
        return sum(part.numel() * part.element_size() for pair in self.layers for part in pair)

    def feed(self, ids: Tensor, rows: int = 0) -> Tensor:
        """Run ids [t] behind what is there, under what was evicted; logits of the last ``rows`` rows (0: all).

        Returns
        -------
        Tensor ``[rows, vocab]``
            Logits.
        """
        ids = inputs.continuation(self.model, ids)
        if not len(ids):
            raise EvictionError("no token is fed; allowed: one id or more")
        inputs.check_length(self.model, self.length + len(ids))
        plan = self._plan()
        prefix = self.layers or None
        wanted = min(len(ids), self.policy.scorer.rows(self.length + len(ids)))
        run = Run(prefix, self.length, plan.layers, capture=torch.arange(len(ids) - wanted, len(ids)))
        cache = engine.new_cache()
        logits = engine.forward(self.model.twin, ids[None], run, cache, rows)[0]
        self._verify(plan, run, len(ids))
        self._append(engine.cached_layers(cache), run)
        self.ids = torch.cat([self.ids, ids])
        return logits

    def holds(self, base: int) -> bool:
        """Whether there are ``base`` entries a head, over whatever the budget makes exact (head, layer, model)."""
        counts = self.keep.sum(-1)
        over = {"head": counts, "layer": counts.float().mean(-1), "model": counts.float().mean()}
        return bool((over[self.policy.budget.exact_over] >= base).all())

    def evict(self, base: int) -> Choice:
        """Keep ``base`` entries a head on average, by the policy's own rules; returns what stays, [L, K, n].

        Of several evictions ``notes`` hold the last facts; a yes (PyramidKV's ``fallback``) stays one.
        """
        base = inputs.count("base", base, 1)
        if not self.length or not self.holds(base):
            most = int(self.keep.sum(-1).max()) if self.length else 0
            raise EvictionError(
                f"{base} entries a head are more than what is there (the fullest head holds {most}); "
                f"allowed: what {self.policy.budget.name} can share"
            )
        scored = [self.policy.score(self._layer(index)) for index in range(len(self.layers))]
        keep, shared = self.policy.sets(scored, Fraction(base, self.length), base)
        self.notes = {
            name: bool(self.notes.get(name)) or value if isinstance(value, bool) else value
            for name, value in shared.notes.items()
        }
        self._drop([each.layer for each in scored], keep)
        return Choice(self.keep.clone(), shared.budgets, shared.notes)

    def prefix(self) -> Prefix:
        """The cache as a prefix for :func:`kvprobe.intervene`, to be used with a KeepMask of ``keep``."""
        return Prefix(self.ids, self.layers)

    def _plan(self) -> Plan:
        geometry, edits = self.model.geometry, {}
        for index, lost in enumerate(~self.keep):
            if bool(lost.any()):
                heads = lost.repeat_interleave(geometry.group, 0)
                edit = Evicted(heads, Rows(self.length), tuple(range(geometry.n_heads)))
                edits[index] = {0: ArmBias((edit,), geometry.n_heads)}
        return Plan(edits, 1, (self.length,), ((),), ({},))

    def _verify(self, plan: Plan, run: Run, count: int) -> None:
        if not plan.layers:
            return
        geometry = self.model.geometry
        shape = (geometry.n_layers, 1, geometry.n_heads)
        step = Step.stack(torch.arange(self.length, self.length + count), run.records, shape)
        receipt = collect(plan, 0, 0, [step], geometry.windows, geometry.n_heads)
        self.receipts.append(receipt.verify(f"tokens {self.length} … {self.length + count - 1}"))

    def _append(self, own: Sequence[tuple[Tensor, Tensor]], run: Run) -> None:
        fresh = [(keys[0], values[0]) for keys, values in own]
        self.layers = [
            (torch.cat([keys, more], 1), torch.cat([values, further], 1))
            for (keys, values), (more, further) in zip(self.layers or _empty(fresh), fresh, strict=True)
        ]
        added = fresh[0][0].shape[1]
        self.length += added
        self.keep = torch.cat([self.keep, self.keep.new_ones(*self.keep.shape[:2], added)], -1)
        self.specs = [run.specs[index] for index in range(len(fresh))]
        wanted = self.policy.scorer.rows(self.length)
        rows = [run.queries[index][0] for index in range(len(fresh))]
        if self.queries:
            rows = [torch.cat(pair, 1) for pair in zip(self.queries, rows, strict=True)]
        self.queries = [each[:, each.shape[1] - min(wanted, each.shape[1]) :] for each in rows]

    def _layer(self, index: int) -> Layer:
        keys, values, positions = pack(*self.layers[index], self.keep[index].to(self.layers[index][0].device))
        return self._view(index, keys, values, positions)

    def _view(self, index: int, keys: Tensor, values: Tensor, positions: Tensor) -> Layer:
        wanted, queries = self.policy.scorer.rows(self.length), self.queries[index]
        if wanted > queries.shape[1]:
            raise EvictionError(
                f"{self.policy.name} looks at the last {wanted} queries, and {queries.shape[1]} tokens are known; "
                "allowed: a smaller window, or a longer first chunk"
            )
        return Layer(
            index,
            self.model.geometry.n_layers,
            keys,
            values,
            self.model.w_o(index),
            queries,
            self.specs[index],
            positions,
            self.length,
            rotary=self._rotary,
            seed=self.policy.seed,
        )

    def _drop(self, layers: Sequence[Layer], keep: Sequence[Tensor]) -> None:
        """Translate kept slots of the packed layers back to positions."""
        for index, layer in enumerate(layers):
            chosen = (keep[index] & layer.alive).cpu()
            self.keep[index] = False
            for head in range(chosen.shape[0]):
                self.keep[index, head, layer.positions[head].cpu()[chosen[head]]] = True


class PackedCache(LiveCache):
    """The same cache with evicted entries really gone; budgets must be equal within a layer.

    Positions stay absolute: kept keys keep their rotation, new ones continue where the text is. Layers with a sliding
    window are refused, because what a window covers is counted in positions.
    """

    def __init__(self, model: Any, policy: Policy) -> None:
        super().__init__(model, policy)
        if any(window is not None for window in model.geometry.windows):
            raise EvictionError(f"{model.name} has sliding-window layers; allowed for those: masks (physical=False)")
        self.positions: list[Tensor] = []

    def _plan(self) -> Plan:
        return Plan({}, 1, (None,), ((),), ({},))

    def _append(self, own: Sequence[tuple[Tensor, Tensor]], run: Run) -> None:
        start = self.length
        super()._append(own, run)
        added = torch.arange(start, self.length).expand(self.model.geometry.n_kv_heads, -1)
        old = self.positions or [added[:, :0]] * len(self.layers)
        self.positions = [torch.cat([each, added], 1) for each in old]

    def prefix(self) -> Prefix:
        """Refused: a prefix is addressed by position, and here positions are missing."""
        raise EvictionError("a packed cache is no prefix; allowed: feed() it on, or a LiveCache with a KeepMask")

    def _layer(self, index: int) -> Layer:
        return self._view(index, *self.layers[index], self.positions[index].to(self.layers[index][0].device))

    def _drop(self, layers: Sequence[Layer], keep: Sequence[Tensor]) -> None:
        super()._drop(layers, keep)
        for index, chosen in enumerate(keep):
            keys, values = self.layers[index]
            self.layers[index] = gather(keys, chosen), gather(values, chosen)
            self.positions[index] = gather(self.positions[index][..., None], chosen.cpu())[..., 0]


def check(policy: Policy) -> None:
    """Refuse policies that cannot run on a cache that was evicted before."""
    if policy.granularity != "kv_head":
        raise EvictionError(f"a cache holds kv heads, not query heads; allowed: granularity='kv_head' ({policy.name})")
    if policy.scorer.aligned:
        raise EvictionError(
            f"{policy.scorer.name} compares heads position by position, and after an eviction they hold different "
            "entries; allowed: prefill-then-evict"
        )
    if policy.scorer.one_set and (policy.selector.name != "topk" or policy.budget.name not in EQUAL):
        raise EvictionError(
            f"{policy.scorer.name} scores all heads alike, and under {policy.name} their entries come to differ; "
            f"allowed: budgets {', '.join(EQUAL)} with topk"
        )
    if policy.scorer.needs_future:
        raise EvictionError(f"{policy.scorer.name} knows what comes after; allowed: prefill-then-evict")


def pack(keys: Tensor, values: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Kept entries of [K, n, d] as [K, m, d] in order of position, padded on the left, with positions [K, m]."""
    if bool(keep.all()):
        return keys, values, torch.arange(keep.shape[1], device=keys.device).expand(keep.shape[0], -1)
    width = int(keep.sum(-1).max())
    order = keep.to(torch.uint8).argsort(dim=-1, stable=True)[:, keep.shape[1] - width :]
    here = keep.gather(1, order)
    parts = [
        part.gather(1, order[..., None].expand(-1, -1, part.shape[-1])) * here[..., None] for part in (keys, values)
    ]
    return parts[0], parts[1], order.masked_fill(~here, -1)


def gather(part: Tensor, keep: Bool[Tensor, "K n"]) -> Tensor:
    """The kept rows of [K, n, d] as [K, b, d]; every head must keep the same number b."""
    counts = keep.sum(-1)
    if int(counts.min()) != int(counts.max()):
        raise EvictionError(
            f"heads keep {int(counts.min())} to {int(counts.max())} entries; allowed for a compacted cache: the same "
            "number on every head of a layer (ragged budgets run as masks)"
        )
    return part[keep].view(part.shape[0], int(counts[0]), part.shape[-1])


def _empty(fresh: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(keys[:, :0], values[:, :0]) for keys, values in fresh]

"""Receipts: the evidence that an intervention did what it says, and only that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvprobe.errors import ReceiptError
from kvprobe.interventions.effects import CELLS_AT_ONCE
from kvprobe.interventions.plan import ArmBias, Plan
from kvprobe.layerspec import LayerRecord
from kvprobe.twopart import visible

LOW_RETAINED = 1e-6


@dataclass(frozen=True)
class SiteCount:
    """What an arm did at one site beside logits: layers it names and fired on, cells or rows expected and rewritten."""

    layers_named: tuple[int, ...]
    layers_fired: tuple[int, ...]
    expected: int
    reached: int


@dataclass(frozen=True)
class Receipt:
    """What one arm of one run did.

    Attributes
    ----------
    layers_named, layers_fired
        Layers that the arm names, and those whose attention applied its bias.
    masked_weight
        Largest softmax weight left on a key with bias −∞: exactly 0.
    cells_expected, cells_reached
        (layer, head, query, key) cells that the bias should meet, counted from positions alone, and those it met.
    retained
        [L, H, T] R, the share of each row's own unmasked softmax that was kept; fp32, 1 where nothing was masked.
    unseen
        layer → number of masked keys that no touched query sees; masking them changed nothing.
    silenced
        (layer, head, query) rows without any key left that the ``zero`` policy set to 0.
    sites
        What was done beside masking: ``"weights"`` (gates) and ``"cache"`` (patches) count (layer, head, query, key)
        cells (a patch of keys and values meets each twice), ``"attention"``, ``"mlp"`` and ``"block"`` rows; each was
        read back after it was written.
    """

    layers_named: tuple[int, ...]
    layers_fired: tuple[int, ...]
    masked_weight: float
    cells_expected: int
    cells_reached: int
    retained: Tensor = field(repr=False)
    unseen: Mapping[int, int] = field(default_factory=dict)
    silenced: Sequence[tuple[int, int, int]] = ()
    sites: Mapping[str, SiteCount] = field(default_factory=dict)

    @property
    def low_retained(self) -> int:
        """Rows with R < 1e-6: almost everything that they attended to was removed."""
        return int((self.retained < LOW_RETAINED).sum())

    @property
    def smallest_retained(self) -> float:
        """The smallest R of the run."""
        return float(self.retained.min()) if self.retained.numel() else 1.0

    def verify(self, what: str) -> Receipt:
        """Raise :class:`ReceiptError` naming what does not hold; returns the receipt itself."""
        problems = []
        if self.layers_fired != self.layers_named:
            problems.append(f"bias applied on layers {list(self.layers_fired)}, asked for {list(self.layers_named)}")
        if self.masked_weight != 0:
            problems.append(f"a masked key kept weight {self.masked_weight:.3g}")
        if self.cells_reached != self.cells_expected:
            problems.append(f"the bias met {self.cells_reached} visible cells, expected {self.cells_expected}")
        for site, count in self.sites.items():
            if count.layers_fired != count.layers_named:
                problems.append(
                    f"{site} rewritten on layers {list(count.layers_fired)}, asked for {list(count.layers_named)}"
                )
            if count.reached != count.expected:
                problems.append(f"{count.reached} places of {site} were rewritten, expected {count.expected}")
        if bool(torch.isnan(self.retained).any()):
            problems.append("a retained mass is NaN")
        if problems:
            raise ReceiptError(f"{what}: the receipt does not hold: {'; '.join(problems)}")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain values for tables and JSON."""
        return {
            "layers": len(
                {*self.layers_fired, *(layer for site in self.sites.values() for layer in site.layers_fired)}
            ),
            "masked_weight": self.masked_weight,
            "cells": self.cells_reached,
            "unseen_keys": sum(self.unseen.values()),
            "silenced_rows": len(self.silenced),
            "smallest_retained": self.smallest_retained,
            "low_retained_rows": self.low_retained,
            **{f"{site}_rewritten": count.reached for site, count in self.sites.items()},
        }


def expected_cells(plan: Plan, arm: int, positions: Tensor, windows: Sequence[int | None], n_heads: int) -> int:
    """Cells that an arm's bias should meet in queries at ``positions``, from positions, windows and cuts alone."""
    total, known = 0, {}
    for layer, by_arm in plan.layers.items():
        if arm not in by_arm:
            continue
        bias = by_arm[arm]
        key = (id(bias), windows[layer])
        if key not in known:
            known[key] = _cells(bias, positions, windows[layer], n_heads)
        total += known[key]
    return total


def _cells(bias: ArmBias, positions: Tensor, window: int | None, n_heads: int) -> int:
    """Visible cells with a bias, over all heads: in blocks of queries, never queries × keys at once."""
    total = 0
    for some in positions.split(max(1, CELLS_AT_ONCE // (n_heads * max(1, len(bias.columns))))):
        values = bias.at(some)
        hit = (values < 0) & visible(some, bias.columns, window)
        total += int(hit.sum()) * (n_heads if values.shape[0] == 1 else 1)
    return total


@dataclass(frozen=True)
class Step:
    """The records of one forward pass of a batch, stacked over layers.

    ``retained`` [L, B, H, t]; ``masked_weight`` and ``reached`` [L, B]; ``fired`` the layers that left a record.
    """

    positions: Tensor
    retained: Tensor
    masked_weight: Tensor
    reached: Tensor
    fired: frozenset[int]
    edited: Mapping[tuple[int, int, str], int] = field(default_factory=dict)

    @classmethod
    def stack(
        cls,
        positions: Tensor,
        records: Mapping[int, LayerRecord],
        shape: tuple[int, int, int],
        rows: Mapping[tuple[int, int, str], int] | None = None,
    ) -> Step:
        """``shape`` is (layers, arms, heads); ``rows`` what hooks on module outputs rewrote."""
        n_layers, arms, heads = shape
        retained = torch.ones(n_layers, arms, heads, len(positions))
        weight, reached = torch.zeros(n_layers, arms), torch.zeros(n_layers, arms, dtype=torch.int64)
        edited = dict(rows or {})
        for layer, record in records.items():
            edited |= {(layer, arm, site): cells for (arm, site), cells in record.edited.items()}
            if record.retained.numel():  # a layer without biases keeps everything
                retained[layer], weight[layer] = record.retained, record.masked_weight
                reached[layer] = record.reached
        fired = frozenset(layer for layer, record in records.items() if record.retained.numel())
        return cls(positions.cpu(), retained, weight, reached, fired, edited)


def collect(
    plan: Plan, arm: int, row: int, steps: Sequence[Step], windows: Sequence[int | None], n_heads: int
) -> Receipt:
    """Join the records of one arm (row ``row`` of its batch) over the passes of a run."""
    named = tuple(layer for layer in sorted(plan.layers) if arm in plan.layers[layer])
    fired = tuple(layer for layer in named if all(layer in step.fired for step in steps))
    chosen = list(named)
    weight = float(torch.stack([step.masked_weight[chosen, row].max() for step in steps]).max()) if chosen else 0.0
    reached = sum(int(step.reached[:, row].sum()) for step in steps)  # on layers that the arm does not name: none
    expected = sum(expected_cells(plan, arm, step.positions, windows, n_heads) for step in steps)
    retained = torch.cat([step.retained[:, row] for step in steps], -1)
    sites = _sites(plan, arm, row, steps, windows, n_heads)
    return Receipt(named, fired, weight, expected, reached, retained, plan.unseen[arm], plan.silenced[arm], sites)


def _sites(
    plan: Plan, arm: int, row: int, steps: Sequence[Step], windows: Sequence[int | None], n_heads: int
) -> dict[str, SiteCount]:
    """What an arm's effects should have met, from positions alone, and what they met."""
    effects = {layer: by_arm[arm] for layer, by_arm in sorted(plan.effects.items()) if arm in by_arm}
    found = {}
    for site in sorted({effect.site for some in effects.values() for effect in some}):
        here = {layer: [e for e in some if e.site == site] for layer, some in effects.items()}
        named = tuple(layer for layer, some in here.items() if some)
        keys = [(step, layer) for step in steps for layer in named]
        fired = tuple(layer for layer in named if all((layer, row, site) in step.edited for step in steps))
        reached = sum(step.edited.get((layer, row, site), 0) for step, layer in keys)
        expected = sum(
            effect.expected(step.positions, windows[layer], n_heads) for step, layer in keys for effect in here[layer]
        )
        found[site] = SiteCount(named, fired, expected, reached)
    return found

"""What an arm does beside biasing logits: scale weights, swap cached entries, remove or add to residual updates.

Each effect acts at one *site* of one layer: ``"weights"`` and ``"cache"`` inside attention (:class:`Gate`,
:class:`Swap`; cells are counted), ``"attention"``, ``"mlp"`` and ``"block"`` on what a module returns (:class:`Remove`,
:class:`Add`; rows are counted).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kvprobe.interventions.scene import Rows
from kvprobe.layerspec import View
from kvprobe.twopart import cap, visible

CELLS = ("weights", "cache")
STREAMS = ("attention", "mlp", "block")
CELLS_AT_ONCE = 1 << 22
"""Cells that are counted together."""


class Effect(Protocol):
    """Anything of this module."""

    @property
    def site(self) -> str:
        """Where it acts: one of CELLS or STREAMS."""
        ...

    @property
    def rows(self) -> Rows:
        """Query rows that are touched."""
        ...

    @property
    def first(self) -> int:
        """First row that it can change."""
        ...

    def expected(self, positions: Tensor, window: int | None, n_heads: int) -> int:
        """Cells (or rows) that it must meet among queries at ``positions``, from positions alone."""
        ...

    def clash(self, other: Any) -> int | None:
        """A key to which both effects of one arm give different content, or None."""
        ...


@dataclass(frozen=True, eq=False)
class Cells:
    """Keys × rows × query heads of one layer; the base of :class:`Gate` and :class:`Swap`."""

    columns: Tensor
    rows: Rows
    heads: tuple[int, ...] | None = None

    @property
    def first(self) -> int:
        """See :class:`Effect`."""
        return max(self.rows.first, int(self.columns[0]))

    def expected(self, positions: Tensor, window: int | None, n_heads: int) -> int:
        """See :class:`Effect`."""
        touched, columns = positions[self.rows.touches(positions)], self.columns.to(positions.device)
        blocks = touched.split(max(1, CELLS_AT_ONCE // max(1, len(columns))))  # never queries × keys at once
        cells = sum(int(visible(some, columns, window).sum()) for some in blocks)
        return cells * (n_heads if self.heads is None else len(self.heads))

    def on_logits(self, view: View) -> int:
        """See :class:`kvprobe.layerspec.CellEdit`."""
        return 0

    def on_weights(self, view: View) -> int:
        """See :class:`kvprobe.layerspec.CellEdit`."""
        return 0

    def on_values(self, view: View, z: Tensor) -> int:
        """See :class:`kvprobe.layerspec.CellEdit`."""
        return 0

    def clash(self, other: Any) -> int | None:
        """See :class:`Effect`."""
        return None

    def _heads(self, view: View) -> tuple[Tensor, Tensor]:
        """(kv head, place in its group) of every head that is touched, [h, 1, 1] each."""
        group = view.query.shape[1]
        count = view.query.shape[0] * group
        heads = torch.tensor(range(count) if self.heads is None else self.heads, device=view.near.device)
        return (heads // group)[:, None, None], (heads % group)[:, None, None]

    def _rows(self, view: View) -> Tensor:
        """Places of the touched rows, [r]."""
        return self.rows.touches(view.positions).nonzero().flatten()

    def _seen(self, view: View, rows: Tensor, columns: Tensor) -> Tensor:
        return visible(view.positions[rows], columns.to(rows.device), view.spec.window)


@dataclass(frozen=True, eq=False)
class Gate(Cells):
    """Multiplies the weights that chosen rows give chosen keys by ``scale``, after the softmax: A stays, o changes."""

    scale: float = 0.0
    site: str = "weights"

    def on_weights(self, view: View) -> int:
        """See :class:`kvprobe.layerspec.CellEdit`."""
        rows, (kv, member), cells = self._rows(view), self._heads(view), 0
        for part, chosen, at, _ in view.sides(self.columns):
            place = (kv, member, rows[None, :, None], at[None, None, :])
            wanted = part[place] * self.scale
            part[place] = wanted
            landed = part[place] == wanted  # read back: what was not written is not met
            cells += int((landed & self._seen(view, rows, self.columns[chosen.cpu()])).sum())
        return cells


@dataclass(frozen=True, eq=False)
class Swap(Cells):
    """Gives chosen rows other keys and/or values at chosen positions: ``keys`` (rotated) and ``values``, [K, C, d]."""

    keys: Tensor | None = field(default=None, repr=False)
    values: Tensor | None = field(default=None, repr=False)
    site: str = "cache"

    def on_logits(self, view: View) -> int:
        """See :class:`kvprobe.layerspec.CellEdit`."""
        if self.keys is None:
            return 0
        rows, (kv, member), cells = self._rows(view), self._heads(view), 0
        query = view.query[kv[:, 0, 0], member[:, 0, 0]][:, rows]  # [h, r, d]
        keys = self.keys.to(query)
        for part, chosen, at, _ in view.sides(self.columns):
            logits = cap(query @ keys[kv[:, 0, 0]][:, chosen].transpose(1, 2), view.spec.softcap)
            seen = self._seen(view, rows, self.columns[chosen.cpu()])
            logits = logits.masked_fill(~seen, -torch.inf)
            place = (kv, member, rows[None, :, None], at[None, None, :])
            part[place] = logits
            cells += int(((part[place] == logits) & seen).sum())
        return cells

    def on_values(self, view: View, z: Tensor) -> int:
        """See :class:`kvprobe.layerspec.CellEdit`."""
        if self.values is None:
            return 0
        rows, (kv, member), cells = self._rows(view), self._heads(view), 0
        values, place = self.values.to(z), (kv[..., 0], member[..., 0], rows[None, :])
        for part, chosen, at, old in view.sides(self.columns):
            weights = part[kv, member, rows[None, :, None], at[None, None, :]]
            change = values[:, chosen] - old
            wanted = z[place] + weights @ change[kv[:, 0, 0]]
            z[place] = wanted
            landed = (z[place] == wanted).all(-1)[..., None]  # [h, r, 1]: a row stands for all its keys
            cells += int((landed & self._seen(view, rows, self.columns[chosen.cpu()])).sum())
        return cells

    def expected(self, positions: Tensor, window: int | None, n_heads: int) -> int:
        """A cell counts once for its key and once for its value."""
        parts = (self.keys is not None) + (self.values is not None)
        return super().expected(positions, window, n_heads) * parts

    def clash(self, other: Any) -> int | None:
        """See :class:`Effect`."""
        if not isinstance(other, Swap) or not self.rows.overlap(other.rows):
            return None
        pairs = ((self.keys, other.keys), (self.values, other.values))
        if not any(mine is not None and theirs is not None for mine, theirs in pairs):
            return None
        if self.heads is not None and other.heads is not None and not {*self.heads} & {*other.heads}:
            return None
        common = self.columns[torch.isin(self.columns, other.columns)]
        return int(common[0]) if len(common) else None


class Rewriting:
    """Whole rows of a module's output; the base of :class:`Remove` and :class:`Add`, which have ``rows``."""

    rows: Rows

    @property
    def first(self) -> int:
        """See :class:`Effect`."""
        return self.rows.first

    def expected(self, positions: Tensor, window: int | None, n_heads: int) -> int:
        """See :class:`Effect`."""
        return int(self.rows.touches(positions).sum())

    def clash(self, other: Any) -> int | None:
        """See :class:`Effect`."""
        return None


@dataclass(frozen=True, eq=False)
class Remove(Rewriting):
    """Takes a module's update out of the residual stream at chosen rows."""

    site: str
    rows: Rows

    def apply(self, output: Tensor, before: Tensor, positions: Tensor) -> int:
        """Rewrite rows of ``output`` [t, D] in place; ``before`` [t, D] is what a block was given."""
        rows = self.rows.touches(positions).nonzero().flatten()
        wanted = before[rows] if self.site == "block" else torch.zeros_like(output[rows])
        output[rows] = wanted
        return int((output[rows] == wanted).all(-1).sum())


@dataclass(frozen=True, eq=False)
class Add(Rewriting):
    """Adds vectors to what a layer's attention returned: one for every row [D], or one a touched row [R, D]."""

    rows: Rows
    vectors: Tensor = field(repr=False)
    site: str = "attention"

    def apply(self, output: Tensor, before: Tensor, positions: Tensor) -> int:
        """See :meth:`Remove.apply`."""
        touched = self.rows.touches(positions).nonzero().flatten()
        wanted = output[touched] + self._of(positions[touched]).to(output)
        output[touched] = wanted
        return int((output[touched] == wanted).all(-1).sum())

    def _of(self, positions: Tensor) -> Tensor:
        if self.vectors.dim() == 1:
            return self.vectors
        if self.rows.positions is None:
            return self.vectors[(positions - self.rows.first).cpu()]
        order = torch.searchsorted(torch.tensor(self.rows.positions), positions.cpu())
        return self.vectors[order]


def stream_order(effects: Sequence[Any]) -> list[Any]:
    """Removals first, additions last: what is injected at a site is not removed there."""
    return sorted(effects, key=lambda effect: isinstance(effect, Add))

"""What one layer's attention is asked, shows to edits, and reports: spec, view and record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


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


@dataclass(frozen=True)
class View:
    """One arm's share of a chunk: logits, or weights, of its rows over prefix (``far``) and own keys (``near``).

    Everything is a view: an edit writes into it. ``query`` [K, G, t, d] is scaled; ``far`` [K, G, t, F] begins at key
    ``low``, ``near`` [K, G, t, M] at ``near_low``; ``far_values`` [K, F, d_v] and ``near_values`` [K, M, d_v].
    """

    query: Tensor
    far: Tensor | None
    near: Tensor
    far_values: Tensor | None
    near_values: Tensor
    positions: Tensor
    low: int
    near_low: int
    prefix_length: int
    spec: LayerSpec

    def sides(self, columns: Tensor) -> Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """(part, which of ``columns`` it holds, their places in it, values there [K, C, d_v]) of both parts."""
        columns = columns.to(self.near.device)
        if self.far is not None and self.far_values is not None:
            chosen = ((columns >= self.low) & (columns < self.prefix_length)).nonzero().flatten()
            at = columns[chosen] - self.low
            yield self.far, chosen, at, self.far_values[:, at]
        last = self.near_low + self.near.shape[-1]
        own = (columns >= max(self.prefix_length, self.near_low)) & (columns < last)
        chosen = own.nonzero().flatten()
        at = columns[chosen] - self.near_low
        yield self.near, chosen, at, self.near_values[:, at]


class CellEdit(Protocol):
    """What an arm does at one layer to more than logits' biases (see :mod:`kvprobe.interventions.effects`)."""

    @property
    def site(self) -> str:
        """Where it acts; the name under which its cells are counted."""
        ...

    def on_logits(self, view: View) -> int:
        """Rewrite logits in place before biases; returns the visible cells that were rewritten."""
        ...

    def on_weights(self, view: View) -> int:
        """Rewrite unnormalised weights in place (their sum is already taken); returns visible cells rewritten."""
        ...

    def on_values(self, view: View, z: Tensor) -> int:
        """Add to the weighted sum of values z [K, G, t, d_v] (not yet divided by the sum of weights), in place."""
        ...


@dataclass
class LayerRecord:
    """What one layer did to one batch of arms: the raw material of a receipt."""

    retained: Tensor  # [B, H, T] kept share R of every row's own unmasked softmax, 1 where nothing was masked
    masked_weight: Tensor  # [B] largest weight found on a key with bias −∞, after the softmax that was used
    reached: Tensor  # [B] number of (head, query, key) cells that a bias met and that were visible
    edited: dict[tuple[int, str], int] = field(default_factory=dict)  # (arm, site) → visible cells that an edit rewrote

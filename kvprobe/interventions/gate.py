"""ValueGate: the counterfactual "this token's content was faint"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from kvprobe.errors import InterventionError, quote
from kvprobe.interventions.effects import Gate
from kvprobe.interventions.hooks import Hooked
from kvprobe.interventions.plan import Scene
from kvprobe.interventions.selecting import Keys, Selective

MAX_SCALE = 1e6
"""Far beyond any question; fp32 weights times much more would overflow."""


@dataclass(frozen=True)
class ValueGate(Selective, Hooked):
    """Scale the values of chosen keys by c, as chosen queries read them; attention is untouched.

    ``o' − o = (c − 1) Σ_S A_i V_i W_O`` and A' = A: no renormalisation (law derived for kvprobe; beside
    :class:`KVMask`, which asks "was not in the cache", this asks "was there, but said nothing").

    Parameters
    ----------
    keys, layers, heads, queries
        As in :class:`KVMask`. A head's gate does not touch the other heads that share its kv head.
    scale
        c: 0 silences, 1 changes nothing, beyond 1 amplifies.
    name
        Label for tables.

    Raises
    ------
    InterventionError
        When compiled for a prompt that it does not fit.
    """

    keys: Keys
    scale: float = 0.0
    layers: int | Sequence[int] | None = None
    heads: int | Sequence[int] | Mapping[int, Sequence[int]] | None = None
    queries: str | int | Sequence[int] = "suffix"
    name: str | None = None

    def check(self, scene: Scene) -> None:
        """Refuse what cannot be applied to this prompt and model, in one line."""
        scale: Any = self.scale
        if isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(float(scale)):
            raise InterventionError(f"scale={quote(scale)} is not allowed: give a finite number (0 silences)")
        if abs(float(scale)) > MAX_SCALE:
            raise InterventionError(f"scale={quote(scale)} is not allowed: give at most {MAX_SCALE:g} in size")
        self.check_selection(scene)

    def cuts(self, layer: int, scene: Scene) -> list[Gate]:
        """The gates of one layer, empty where this one does not apply."""
        if not self.applies(layer, scene):
            return []
        heads = self.selected_heads(layer)
        return [
            Gate(torch.arange(start, stop), self.rows(scene, stop), heads, float(self.scale))
            for start, stop in self.spans(scene)
        ]

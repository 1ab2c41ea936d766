"""KVMask: the exact counterfactual "this token was not in the cache"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from kvprobe.errors import InterventionError
from kvprobe.interventions.hooks import Hooked
from kvprobe.interventions.plan import Cut, Scene
from kvprobe.interventions.selecting import Keys, Selective

POLICIES = ("raise", "zero", "keep_self")
MAX_BETA = 1e4
"""Far beyond any fp32 softmax: e^(−1e4) is 0. Larger finite values would overflow."""


@dataclass(frozen=True)
class KVMask(Selective, Hooked):
    """Add −∞ (or a finite −β) to the attention logits of chosen keys.

    With β = ∞ a chosen query attends as if the keys had never been cached: ``A' = N ⊙ A / R`` with N = 0 on the keys
    and R the retained mass (CriticalKV, arXiv 2502.03805, Theorem 3.2). K and V need no separate treatment. With finite
    β, N = e^{−β} on the keys.

    Parameters
    ----------
    keys
        Token spans ``(start, stop)``, half-open, or names of the prompt's spans; one span may be given bare. ``[]`` is
        the identity: an arm that masks nothing.
    layers
        None for all, one index, or several.
    heads
        None for all, one query-head index, several, or ``{layer: heads}`` for different heads per layer.
    queries
        ``"suffix"``: the last ``suffix`` prompt tokens and whatever follows them (eviction after prefill);
        ``"after"``: every position after the span (it never existed for what follows);
        ``"generated"``: tokens after the prompt only; or explicit absolute positions.
    beta
        Strength in nats; ``inf`` removes.
    on_empty
        A row whose visible keys are all removed has no attention: ``"raise"`` (default), ``"zero"`` (head output
        exactly 0) or ``"keep_self"`` (a query's own key is never masked).
    name
        Label for tables.

    Raises
    ------
    InterventionError
        When compiled for a prompt that it does not fit.
    """

    keys: Keys
    layers: int | Sequence[int] | None = None
    heads: int | Sequence[int] | Mapping[int, Sequence[int]] | None = None
    queries: str | int | Sequence[int] = "suffix"
    beta: float = math.inf
    on_empty: str = "raise"
    name: str | None = None

    def check(self, scene: Scene) -> None:
        """Refuse what cannot be applied to this prompt and model, in one line."""
        if self.on_empty not in POLICIES:
            raise InterventionError(f"on_empty={self.on_empty!r} is not one of {', '.join(POLICIES)}")
        beta: Any = self.beta
        if isinstance(beta, bool) or not isinstance(beta, Real) or not float(beta) > 0:
            raise InterventionError(f"beta={self.beta!r} must be positive (nats; inf removes the keys)")
        if math.isfinite(float(beta)) and float(beta) > MAX_BETA:
            raise InterventionError(
                f"beta={self.beta!r} is not allowed: give at most {MAX_BETA:g} nats, or inf to remove"
            )
        self.check_selection(scene)

    def cuts(self, layer: int, scene: Scene) -> list[Cut]:
        """The cuts of one layer, empty where this mask does not apply."""
        if not self.applies(layer, scene):
            return []
        heads, keep_self = self.selected_heads(layer), self.on_empty == "keep_self"
        return [
            Cut(start, stop, self.rows(scene, stop), -float(self.beta), heads, keep_self, self.on_empty)
            for start, stop in self.spans(scene)
        ]

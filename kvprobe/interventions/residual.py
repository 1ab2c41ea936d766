"""ResidualAblation: the counterfactual "the layer did nothing here"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvprobe.errors import InterventionError, quote
from kvprobe.interventions.effects import STREAMS, Remove
from kvprobe.interventions.hooks import Hooked
from kvprobe.interventions.plan import Scene
from kvprobe.interventions.selecting import Layered


@dataclass(frozen=True)
class ResidualAblation(Layered, Hooked):
    """Remove what a layer adds to the residual stream at chosen positions.

    ``what="block"``: the layer's output equals its input there. ``"attention"`` or ``"mlp"``: that module returns 0
    there (before a norm that follows it, whose value at 0 is 0 for an RMS norm). Other positions change only through
    what later layers read.

    Parameters
    ----------
    what
        ``"block"``, ``"attention"`` or ``"mlp"``.
    layers
        None for all, one index, or several.
    queries
        ``"suffix"``: the last ``suffix`` prompt tokens and whatever follows; ``"generated"``; or explicit positions.
    name
        Label for tables.

    Raises
    ------
    InterventionError
        When compiled for a prompt that it does not fit.
    """

    what: str = "block"
    layers: int | Sequence[int] | None = None
    queries: str | int | Sequence[int] = "suffix"
    name: str | None = None

    def check(self, scene: Scene) -> None:
        """Refuse what cannot be applied to this prompt and model, in one line."""
        if self.what not in STREAMS:
            raise InterventionError(f"what={quote(self.what)} is not one of {', '.join(STREAMS)}")
        layers = self.selected_layers(scene)
        if not layers:
            raise InterventionError(f"layers={quote(self.layers)} name no layer: allowed is at least one")
        self.check_layers(scene, layers)
        self.check_rows(scene)

    def cuts(self, layer: int, scene: Scene) -> list[Remove]:
        """The removal of one layer, empty where this one does not apply."""
        return [Remove(self.what, self.rows(scene))] if layer in self.selected_layers(scene) else []

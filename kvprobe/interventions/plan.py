"""From interventions to numbers: which keys get which bias, for which queries, heads and layers.

A :class:`Plan` holds, for every layer and arm, an :class:`ArmBias`, and knows everything that follows from positions
alone before any compute is spent: the first query that anything touches, rows that would lose every visible key, and
keys that no touched query can see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprobe.errors import InterventionError
from kvprobe.interventions.effects import Add
from kvprobe.interventions.foreseen import silenced, unseen
from kvprobe.interventions.scene import ArmBias, Cut, Edit, Intervention, Rows, Scene

__all__ = ["ArmBias", "Cut", "Edit", "Intervention", "Plan", "Rows", "Scene", "compile_arms"]


@dataclass(frozen=True)
class Plan:
    """Compiled arms: layer → arm → :class:`ArmBias`, plus what positions alone decide.

    ``effects`` is layer → arm → what the arm does there beside biases.
    """

    layers: dict[int, dict[int, ArmBias]]
    n_arms: int
    first: tuple[int | None, ...]
    silenced: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    unseen: tuple[dict[int, int], ...] = field(default=())
    effects: dict[int, dict[int, tuple[Any, ...]]] = field(default_factory=dict)

    def select(self, arms: Sequence[int]) -> dict[int, dict[int, ArmBias]]:
        """The biases of a batch of arms, renumbered 0 … len(arms) − 1."""
        return _renumbered(self.layers, arms)

    def select_effects(self, arms: Sequence[int], sites: Sequence[str]) -> dict[int, dict[int, tuple[Any, ...]]]:
        """The effects of a batch of arms at some sites, renumbered as in :meth:`select`."""
        chosen = _renumbered(self.effects, arms)
        found = {
            layer: {arm: tuple(e for e in some if e.site in sites) for arm, some in by_arm.items()}
            for layer, by_arm in chosen.items()
        }
        return {layer: {arm: some for arm, some in by_arm.items() if some} for layer, by_arm in found.items()}


def _renumbered(by_layer: dict[int, dict[int, Any]], arms: Sequence[int]) -> dict[int, dict[int, Any]]:
    """layer → arm → … of some arms only, numbered 0 … len(arms) − 1 in their order."""
    order = {arm: place for place, arm in enumerate(arms)}
    return {
        layer: chosen
        for layer, by_arm in by_layer.items()
        if (chosen := {order[arm]: value for arm, value in by_arm.items() if arm in order})
    }


def compile_arms(arms: Sequence[Sequence[Intervention]], scene: Scene) -> Plan:
    """Compile arms for one prompt; raises one clear :class:`InterventionError` before anything is run."""
    layers: dict[int, dict[int, ArmBias]] = {}
    effects: dict[int, dict[int, tuple[Any, ...]]] = {}
    for number, arm in enumerate(arms):
        for part in arm:
            part.check(scene)
        seen: dict[tuple[Edit, ...], ArmBias] = {}  # equal layers share one bias object
        for layer in range(scene.n_layers):
            every = [edit for part in arm for edit in part.cuts(layer, scene)]
            cuts = tuple(edit for edit in every if not hasattr(edit, "site"))
            if len(cuts) < len(every):
                some = tuple(edit for edit in every if hasattr(edit, "site"))
                effects.setdefault(layer, {})[number] = some
                _check_together(some, layer, scene)
            if cuts:
                layers.setdefault(layer, {})[number] = seen.setdefault(cuts, ArmBias(cuts, scene.n_heads))
    first = tuple(_first(layers, effects, number) for number in range(len(arms)))
    empty = tuple(tuple(silenced(layers, number, scene)) for number in range(len(arms)))
    hidden = tuple(unseen(layers, number, scene) for number in range(len(arms)))
    return Plan(layers, len(arms), first, empty, hidden, effects)


def _check_together(effects: Sequence[Any], layer: int, scene: Scene) -> None:
    """Refuse effects of one arm that contradict each other."""
    for place, effect in enumerate(effects):
        for other in effects[:place]:
            if _lost(effect, other) or _lost(other, effect):
                raise InterventionError(
                    f"one arm injects into layer {layer} and removes its block at the same rows: the block's output "
                    "would be its input, the injection lost; allowed: what='attention' and 'mlp', other layers or rows"
                )
            key = effect.clash(other)
            if key is not None:
                raise InterventionError(
                    f"two patches of one arm give key {key + scene.offset} other content (layer {layer}): allowed is "
                    "one donor for a key's keys and one for its values, in the same heads and rows"
                )


def _lost(removal: Any, addition: Any) -> bool:
    """Whether what is added inside a block is thrown away with the block's update."""
    inside = removal.site == "block" and isinstance(addition, Add)
    return inside and bool(removal.rows.overlap(addition.rows))


def _first(
    layers: dict[int, dict[int, ArmBias]], effects: dict[int, dict[int, tuple[Any, ...]]], arm: int
) -> int | None:
    """First query that an arm can change: for its attention, it must also see the key."""
    cuts = {cut for by_arm in layers.values() if arm in by_arm for cut in by_arm[arm].cuts}
    biased = [max(cut.rows.first, int(cut.columns[0])) for cut in cuts]
    return min([*biased, *(effect.first for by in effects.values() for effect in by.get(arm, ()))], default=None)

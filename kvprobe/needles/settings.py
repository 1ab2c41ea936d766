"""Everything about a needle probe that is decided before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvprobe import tasks
from kvprobe.errors import TaskError
from kvprobe.heads import stored as stored_rule
from kvprobe.tasks.items import Item

FEATURES = ("mass", "delta_mass", "value_mass", "bound", "centred_bound", "perturbation")
CHOICES = {
    "gate_contrast": ("hard", "distractor"),
    "gate_score": ("mass", "delta_mass"),
    "gate_at": ("last", "answer"),
    "p": (1, 2),
}
PRESETS = {"ruler32k": {"length": 32_768, "items": 100, "decoys": 0}}


@dataclass(frozen=True)
class Settings:
    """Everything that is decided before a run, and stored with it.

    Attributes
    ----------
    task, length, seed
        See :func:`kvprobe.tasks.make`; item i is made with seed ``seed · 10000 + i``.
    items
        Number of items.
    decoys, distractors
        Spans to compare with; decoys are planted like needles (0 is RULER's protocol).
    new_tokens
        Tokens decoded greedily per arm; None: the gold answer's length + 8.
    exclude_layers
        Layers left out of head averages and of the gate: a rule stated before the run.
    layer_rule
        Where they come from, if a stored rule named them: its file, model, settings (:func:`kvprobe.heads.read_rule`).
    gate_contrast, gate_score, gate_at
        The gate compares E with ``hard`` (H ∪ decoys) or ``distractor`` spans, by ``mass`` or ``delta_mass`` summed
        over layers and heads, at the ``last`` prompt token or the ``answer`` tokens.
    p
        The norm of value mass, bounds and perturbation.
    """

    task: str = "niah_multikey_1"
    length: int = 1500
    items: int = 6
    seed: int = 0
    decoys: int = 4
    distractors: int | str | None = None
    new_tokens: int | None = None
    exclude_layers: tuple[int, ...] = ()
    gate_contrast: str = "hard"
    gate_score: str = "mass"
    gate_at: str = "last"
    gate_threshold: float = 0.6
    p: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    layer_rule: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise TaskError(f"{name} is {getattr(self, name)!r}, must be one of {', '.join(map(str, allowed))}")
        if self.task not in tasks.names():
            raise TaskError(f"no task {self.task!r}, must be one of {', '.join(tasks.names())}")

    def item(self, model: Any, index: int) -> Item:
        """Make item ``index`` of this run."""
        options = dict(self.options, decoys=self.decoys)
        if self.distractors is not None:
            options["distractors"] = self.distractors
        return tasks.make(self.task, model, length=self.length, seed=self.seed * 10_000 + index, **options)


def from_command(given: Mapping[str, Any]) -> Settings:
    """Settings from the words of ``kvprobe niah``; a preset fills in what was not given."""
    preset = given["preset"]
    if preset is not None and preset not in PRESETS:
        raise TaskError(f"no preset {preset!r}, must be one of {', '.join(PRESETS)}")
    options = {"template": given["template"]}
    options |= {name: given[name] for name in ("needles",) if given[name] is not None}
    if given["haystack"] is not None:
        options["path"] = str(given["haystack"])
    plain = ("task", "seed", "distractors", "new_tokens", "gate_contrast", "gate_score", "gate_at")
    values = {name: given[name] for name in plain} | PRESETS.get(preset or "", {})
    values |= {name: given[name] for name in ("length", "items", "decoys") if given[name] is not None}
    layers, rule = _layers(given["exclude_layers"], given.get("model"))
    return Settings(**values, exclude_layers=layers, layer_rule=rule, p=given["norm"], options=options)


def _layers(text: str, model: str | None) -> tuple[tuple[int, ...], dict[str, Any] | None]:
    """Layers as given, or those of a rule that was stored for this model, with the rule's origin."""
    if text.strip().endswith(".json"):
        stored = stored_rule.read_rule(text.strip(), model)
        return tuple(stored["excluded"]), stored_rule.origin(stored)
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()})), None
    except ValueError:
        raise TaskError(
            f"exclude_layers is {text!r}, must be whole numbers with commas, like 0,1, or a stored rule's .json file"
        ) from None

"""Everything about a placebo experiment that is decided before it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvprobe import tasks
from kvprobe.errors import TaskError, quote
from kvprobe.inputs import words
from kvprobe.placebo.dosing import KAPPAS
from kvprobe.placebo.finder import REMEDIES
from kvprobe.tasks.items import Item
from kvprobe.tasks.traces import TraceItem

MATCH_ON = ("bound", "perturbation")
"""Both contrasts are always run: equal θ is not an equal blow."""

ARMS = ("gate", "placebo", "length_only", "injected", "dose")

CHOICES = {
    "inject": ("unmatched", "always", "never"),
    "direction": ("placebo", "random"),
    "level": ("layer", "head"),
    "rule": ("first", "stays"),
    "p": (1, 2),
}


BOUNDS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "caliper": ("a finite number above 0", lambda x: 0 < x < math.inf),
    "position_caliper": ("a finite number above 0", lambda x: 0 < x < math.inf),
    "profile_weight": ("a finite number, at least 0", lambda x: 0 <= x < math.inf),
    "threshold": ("from 0 to 1 bits", lambda x: 0 <= x <= 1),
    "rho": ("above 0 and at most 1", lambda x: 0 < x <= 1),
}


@dataclass(frozen=True)
class Settings:
    """Everything that is decided before a run, and stored with it.

    Attributes
    ----------
    task, length, items, seed
        A needle task or a trace task of :mod:`kvprobe.tasks`; item i is made with seed ``seed · 10000 + i``.
    path
        A JSONL file of the user's own items instead (``task`` is then ``"user"`` or ``"user_traces"``).
    placebos, caliper, position_caliper, profile_weight, remedies
        See :func:`kvprobe.placebo.match`.
    inject
        Whether vectors are injected where no placebo was found (``"unmatched"``), ``"always"`` or ``"never"``.
    direction, level
        Of injected vectors: a length-only span's own Δo (``"placebo"``; random in rows that see nothing of the span) or
        ``"random"``; their norm is the target's by ``"layer"`` or by ``"head"``.
    kappas
        Doses: shares of the full strength.
    threshold, rule, rho
        Settling: g in bits, ``"first"`` or ``"stays"``; a token is deep at ⌈ρL⌉ or later.
    layers
        Layers that are masked and summed over; None: all.
    residual_norm
        Divide each layer's strength by the mean norm of its hidden state.
    rows
        Of traces: rows that strengths are averaged over, evenly spaced (a mask touches all rows behind its keys).
    p
        The norm of strengths.
    arms
        What is run beside ``clean``, ``identity`` and ``target``.
    """

    task: str = "niah_multikey_1"
    length: int | None = 1500
    items: int = 12
    seed: int = 0
    path: str | None = None
    placebos: int = 4
    caliper: float = 0.25
    position_caliper: float | None = None
    profile_weight: float = 0.0
    remedies: tuple[str, ...] = REMEDIES
    inject: str = "unmatched"
    direction: str = "placebo"
    level: str = "layer"
    kappas: tuple[float, ...] = KAPPAS
    threshold: float = 0.5
    rule: str = "first"
    rho: float = 0.85
    layers: tuple[int, ...] | None = None
    residual_norm: bool = False
    rows: int = 64
    new_tokens: int | None = None
    p: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    arms: tuple[str, ...] = ARMS

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise TaskError(
                    f"{name} is {quote(getattr(self, name))}, must be one of {', '.join(map(str, allowed))}"
                )
        known = (*tasks.names(), *tasks.trace_names(), *USER)
        if self.task not in known:
            raise TaskError(f"no task {self.task!r}, must be one of {', '.join(known)}")
        if (self.path is None) == (self.task in USER):
            raise TaskError(
                f"task {self.task!r} with path={quote(self.path)}: a file goes with {' or '.join(USER)} only"
            )
        for name, low in (("items", 1), ("placebos", 1), ("rows", 2), ("seed", 0)):
            if getattr(self, name) < low:
                raise TaskError(f"{name} is {getattr(self, name)}, must be at least {low}")
        self._check_numbers()
        if self.layers is not None and not self.layers:
            raise TaskError("layers names none, must be at least one, or left out for all")
        for kappa in self.kappas:
            if not 0 < kappa < 1:
                raise TaskError(f"kappas holds {kappa:g}, must be shares between 0 and 1 (1 is the target arm itself)")
        strange = [name for name in self.arms if name not in ARMS]
        if strange:
            raise TaskError(f"arms holds {quote(strange[0])}, must be some of {', '.join(ARMS)}")
        unknown = [name for name in self.remedies if name not in REMEDIES]
        if unknown or not self.remedies:
            raise TaskError(f"remedies holds {quote(unknown)}, must be some of {', '.join(REMEDIES)}")

    def _check_numbers(self) -> None:
        """Refuse before any run what matching and settling would refuse in its midst."""
        for name, (allowed, holds) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise TaskError(f"{name} is {value:g}, must be {allowed}")

    def running(self, arms: Sequence[str] | None) -> Settings:
        """These settings with other arms."""
        return self if arms is None else replace(self, arms=(arms,) if isinstance(arms, str) else tuple(arms))

    @property
    def traces(self) -> bool:
        """Whether the items are reasoning traces."""
        return self.task in tasks.trace_names() or self.task == "user_traces"

    def make(self, model: Any) -> list[Item] | list[TraceItem]:
        """All items of this run."""
        if self.path is not None:
            from kvprobe.tasks import user

            made: Any = user.traces(self.path, model) if self.traces else user.items(self.path, model)
            return made
        seeds = [self.seed * 10_000 + index for index in range(self.items)]
        if self.traces:
            return [tasks.trace(self.task, model, seed=seed, length=self.length, **self.options) for seed in seeds]
        length = 1500 if self.length is None else self.length
        # Every sentence of the haystack is labelled: pieces of token sets may begin where sentences do.
        options = {"distractors": "max"} | self.options
        return [tasks.make(self.task, model, length=length, seed=seed, **options) for seed in seeds]


USER = ("user", "user_traces")


def from_command(given: Mapping[str, Any]) -> Settings:
    """Settings from the words of ``kvprobe placebo``."""
    plain = (
        *("seed", "placebos", "caliper", "position_caliper", "profile_weight", "inject", "direction", "level"),
        *("threshold", "rule", "rho", "residual_norm", "new_tokens"),
    )
    task, path = given["task"], given["file"]
    if path is not None and task in (None, "user"):
        task = "user"
    elif path is not None and task in ("user_traces", *tasks.trace_names()):
        task = "user_traces"
    elif path is not None:
        raise TaskError(f"--file with --task {task}: leave the task out, or give --task trace_memory for traces")
    task = task or "niah_multikey_1"
    _refuse_beside_file(given, path)
    traced = task in tasks.trace_names()
    values: dict[str, Any] = {name: given[name] for name in plain}
    values["options"] = _options(given, task, traced)
    if given["length"] is not None or traced or path is not None:
        values["length"] = given["length"]
    if given["items"] is not None:
        values["items"] = given["items"]
    return Settings(
        task=task,
        path=None if path is None else str(path),
        remedies=words(given["remedies"]) if given["remedies"] else REMEDIES,
        kappas=tuple(_number("kappas", word) for word in words(given["kappas"])),
        layers=None if given["layers"] is None else tuple(sorted({_whole(word) for word in words(given["layers"])})),
        p=given["norm"],
        **values,
    )


def _refuse_beside_file(given: Mapping[str, Any], path: Any) -> None:
    """A file's lines are all run, each as long as it is."""
    for name in ("length", "items"):
        if path is not None and given[name] is not None:
            raise TaskError(f"--{name} {given[name]} with --file {path}: leave it out, every line is one item")


def _options(given: Mapping[str, Any], task: str, traced: bool) -> dict[str, Any]:
    """Options of the needle tasks, refused for others."""
    found = {name: given[name] for name in ("needles", "decoys") if given[name] is not None}
    if given["haystack"] is not None:
        found["path"] = str(given["haystack"])
    if (traced or task in USER) and found:
        raise TaskError(f"{', '.join(found)}: options of needle tasks, not of {task}")
    return found


def _number(name: str, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise TaskError(f"{name} holds {word!r}, must be numbers with commas, like 0.25,0.5") from None


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise TaskError(f"layers holds {word!r}, must be whole numbers with commas, like 10,11,12") from None

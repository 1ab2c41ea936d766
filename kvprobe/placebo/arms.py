"""The arms of one item: what is cut, how strong a blow that is, and the intervention that does it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvprobe.errors import InterventionError
from kvprobe.interventions import Inject, KVMask, ValueGate
from kvprobe.placebo.dosing import doses_of_each
from kvprobe.placebo.finder import Match
from kvprobe.placebo.injecting import injection
from kvprobe.placebo.keysets import KeySet
from kvprobe.placebo.scope import Scope
from kvprobe.placebo.settings import Settings
from kvprobe.placebo.strength import MEASURES

if TYPE_CHECKING:
    import pandas as pd

Strengths = Mapping[str, float]


@dataclass(frozen=True)
class Arm:
    """One counterfactual.

    Attributes
    ----------
    arm
        ``clean``, ``identity``, ``target``, ``gate``, ``placebo``, ``length_only``, ``injected_target``, ``injected``,
        ``dose_target`` or ``dose_placebo``.
    match_on, remedy, number, ln_ratio
        Of placebos: how they were matched, where they come from, which one, and how near.
    keys
        What is cut; of an injection, whose Δo is the direction.
    strengths
        Closed forms of the clean run; those that an arm does not have are left out.
    tested
        Of placebos: whether it shares no key with the others so marked. The primary test permutes the target's label
        among those alone: effects of sets that share keys go together, and the target would look the odd one out.
    """

    arm: str
    parts: tuple[Any, ...]
    keys: KeySet = ()
    match_on: str = ""
    remedy: str = ""
    number: int = 0
    ln_ratio: float = math.nan
    kappa: float = math.nan
    beta: float = math.nan
    strengths: Strengths = field(default_factory=dict)
    tested: bool = True


@dataclass(frozen=True)
class Design:
    """One item as the arms see it: its clean trace, target, matches and length-only windows, and who loses the keys.

    ``table`` has all measures of the target (first row) and the windows.
    """

    trace: Any
    target: KeySet
    matches: Mapping[str, Match]
    windows: Sequence[KeySet]
    settings: Settings
    queries: Any
    table: pd.DataFrame
    seed: int = 0
    after: bool = False
    layer_weights: Any = None

    def mask(self, keys: Any, beta: float = math.inf) -> KVMask:
        """The mask of a key set."""
        return KVMask([*keys], layers=self.settings.layers, queries=self.queries, beta=beta)

    def full(self) -> list[Arm]:
        """Arms whose answers are decoded: clean first, then identity."""
        strengths = [dict(zip(MEASURES, row, strict=True)) for row in self.table[[*MEASURES]].to_numpy().tolist()]
        target = self.mask(self.target)
        gate = ValueGate([*self.target], 0.0, layers=self.settings.layers, queries=self.queries)
        arms = [
            Arm("clean", ()),
            Arm("identity", (self.mask([]),)),
            Arm("target", (target,), self.target, strengths=strengths[0]),
        ]
        wanted = self.settings.arms
        if "gate" in wanted:
            kept = {name: strengths[0][name] for name in ("mass", "value_mass")}
            arms.append(Arm("gate", (gate,), self.target, strengths=kept))
        for match_on, match in self.matches.items():
            arms += self._placebos(match_on, match) if "placebo" in wanted else []
        if "length_only" in wanted:
            arms += self._windows(strengths[1:])
        return arms + (self._injected(strengths[0]) if self.injects else [])

    def _windows(self, strengths: Sequence[Strengths]) -> list[Arm]:
        arms = []
        for number, (keys, strength) in enumerate(zip(self.windows, strengths, strict=True)):
            arms.append(Arm("length_only", (self.mask(keys),), keys, number=number, strengths=strength))
        return arms

    @property
    def rows_trace(self) -> Any:
        """The clean run at every row that the masks touch."""
        return self.trace

    @property
    def injects(self) -> bool:
        """Whether vectors are injected."""
        unmatched = any(not match.matched for match in self.matches.values())
        wanted = self.settings.inject == "always" or (self.settings.inject == "unmatched" and unmatched)
        return wanted and "injected" in self.settings.arms

    def graded(self) -> list[Arm]:
        """Doses of the target, and of its placebos at equal perturbation."""
        if "dose" not in self.settings.arms or not self.settings.kappas:
            return []
        match = self.matches["perturbation"]
        sets = [self.target, *match.placebos]
        scope = Scope(self.trace, layer_weights=self.layer_weights, **self.scope)
        arms = []
        for place, (keys, found) in enumerate(zip(sets, doses_of_each(scope, sets, self.settings.kappas), strict=True)):
            named = ("perturbation", match.remedy or "", place - 1) if place else ("", "", 0)
            for dose in found:
                arms.append(
                    Arm(
                        "dose_placebo" if place else "dose_target",
                        (self.mask(keys, dose.beta),),
                        keys,
                        *named,
                        kappa=dose.kappa,
                        beta=dose.beta,
                        strengths=dose.strengths,
                    )
                )
        return arms

    @property
    def scope(self) -> dict[str, Any]:
        """Where strengths are taken."""
        return {"layers": self.settings.layers, "p": self.settings.p, "after": self.after}

    def _placebos(self, match_on: str, match: Match) -> list[Arm]:
        rows = match.strengths[[*MEASURES]].to_numpy().tolist()[1:]  # the first row is the target's
        arms = []
        for number, (keys, ratio, row) in enumerate(zip(match.placebos, match.ln_ratios, rows, strict=True)):
            strengths = dict(zip(MEASURES, row, strict=True))
            named = (match_on, match.remedy or "", number, ratio)
            tested = match.apart[number]
            arms.append(Arm("placebo", (self.mask(keys),), keys, *named, strengths=strengths, tested=tested))
        return arms

    def _injected(self, strengths: Strengths) -> list[Arm]:
        """The target's own Δo, and as large vectors that point elsewhere, through one channel: exchangeable arms."""
        settings = self.settings
        arms = [self._injection("injected_target", self.target, self.target, 0, strengths)]
        for number, keys in enumerate(self.windows):
            direction = keys if settings.direction == "placebo" else "random"
            arms.append(self._injection("injected", keys, direction, number, strengths))
        return arms

    def _injection(self, arm: str, keys: KeySet, direction: Any, number: int, strengths: Strengths) -> Arm:
        settings = self.settings
        seed = self.seed * 100 + number
        trace = self.rows_trace
        vectors = self._vectors(trace, direction, seed)
        part = Inject(vectors, queries=[*trace.queries])
        # By layer the norms are the target's; by head their sum over heads is another number.
        kept = (
            {"perturbation": strengths["perturbation"]} if settings.level == "layer" or arm == "injected_target" else {}
        )
        return Arm(arm, (part,), keys, remedy="injected", number=number, strengths=kept)

    def _vectors(self, trace: Any, direction: Any, seed: int) -> dict[int, Tensor]:
        """Vectors of the target's norm; random ones in rows that see nothing of the keys whose Δo is the direction."""
        try:
            return injection(trace, self.target, direction, level=self.settings.level, seed=seed, **self.scope)
        except InterventionError:
            if isinstance(direction, str):
                raise
            return self._partly_random(trace, direction, seed)

    def _partly_random(self, trace: Any, keys: KeySet, seed: int) -> dict[int, Tensor]:
        """By level "head" each head by itself: a head whose window ends too early is the one that gets a random one."""
        heads = range(len(trace.layer(0).w_o)) if self.settings.level == "head" else (None,)
        found: dict[int, Tensor] = {}
        for head in heads:
            place = {"heads": head, **self.scope}
            own, away = (injection(trace, keys_, keys_, **place) for keys_ in (self.target, keys))
            drawn = injection(trace, self.target, "random", seed=seed * 1000 + (head or 0), **place)
            for layer, vectors in drawn.items():
                part = _directed(own[layer], away[layer], vectors, self.settings.p)
                found[layer] = found[layer] + part if layer in found else part
        return found


def _directed(own: Tensor, away: Tensor, drawn: Tensor, p: int) -> Tensor:
    """[Q, D] of ``own``'s norms in ``away``'s directions, ``drawn`` where those are 0."""
    size, length = (x.double().norm(p=p, dim=-1, keepdim=True) for x in (own, away))
    along = size * away / torch.where(length == 0, 1.0, length)
    return torch.where(length == 0, drawn, along).to(own.dtype)

"""Does the primary test of a placebo contrast reject at its level when nothing is there?

    python analyses/placebo_calibration.py --out out/placebo_calibration

The target is replaced by a random span that is no evidence, its placebos are found by the library's own rule, and the
primary test is applied, again and again, on a table of effects that is measured once. What is claimed holds for these
items: they are not drawn again. Writes ``rows.parquet`` (a row a remedy × matching × reading), ``effects.parquet`` (a
row a span that was cut or injected), the figure and a manifest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from calibrating import calibrate, groups
from common import Analysis, progress
from span_effects import ESSAY, MANY, NOISE, Observed, draw, items, whole

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvprobe.placebo import KeySet
    from kvprobe.tasks.items import Item

MATCH_ON = ("bound", "perturbation")
KEYS = ["remedy", "match_on", "reading"]
OWN, MASKED, UNIONS, SINGLE = "own Δo injected", "mask against injected", "union", "single H"
READINGS = (
    *(("contiguous", match_on, "window") for match_on in MATCH_ON),
    *(("hard", match_on, SINGLE) for match_on in MATCH_ON),
    *(("hard_set", match_on, reading) for reading in (UNIONS, SINGLE) for match_on in MATCH_ON),
    *(("token_set", match_on, "token set") for match_on in MATCH_ON),
    *(("injected", "perturbation", reading) for reading in (OWN, MASKED)),
)
"""Remedy, what is matched, and what the pseudo-target is."""

__all__ = ["ANALYSIS", "compute", "main", "plan", "plot"]


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a run."""

    made: dict[str, list[Item]] = field(repr=False)
    items: int = 8
    noise_items: int = 4
    length: int = 1100
    needles: int = 9
    windows: int = 48
    unions: int = 60
    deals: int = 8
    injected: int = 10
    placebos: int = 4
    caliper: float = 0.25
    draws: int = 1000
    seed: int = 0


def plan(model: Any, **asked: Any) -> Plan:
    """Check everything, and make the items: see :class:`Plan` for what can be asked."""
    from kvprobe.errors import TaskError, quote

    planned = Plan({}, **asked)
    least = {"items": 2, "noise_items": 0, "length": 1, "needles": 2, "windows": 1, "unions": 0, "deals": 0}
    least |= {"injected": 0, "placebos": 1, "draws": 1, "seed": 0}
    whole({name: (getattr(planned, name), low) for name, low in least.items()})
    if not 0 < planned.caliper < np.inf:
        raise TaskError(f"caliper is {quote(planned.caliper)}, must be a number above 0")
    for task in (ESSAY, MANY, NOISE):
        count = planned.noise_items if task == NOISE else planned.items
        planned.made[task] = items(model, task, count, planned.length, planned.seed, planned.needles)
    return planned


def compute(model: Any, asked: Plan) -> pd.DataFrame:
    """Rates of p < 0.05 of every remedy and reading.

    Returns
    -------
    DataFrame
        ``remedy``, ``match_on``, ``reading``: where pseudo-target and placebos come from, what is matched, and what the
        pseudo-target is; ``targets``, ``unmatched``: pseudo-targets in all, and those without placebos, which are never
        drawn; then see :func:`calibrating.calibrate`. ``attrs["tables"]``: ``effects``, a row a span × item.
    """
    import pandas as pd

    probes = [Probe.of(model, item, index, asked) for index, item in progress("items")(_numbered(asked))]
    rows = [row(probes, *reading, asked) for reading in READINGS]
    effects = pd.concat([each for probe in probes for each in probe.tables.values()], ignore_index=True)
    table = pd.DataFrame(rows)
    table.attrs = {"tables": {"effects": effects}, "about": _about(model, probes, asked)}
    return table


def _numbered(asked: Plan) -> list[tuple[int, Item]]:
    return [(index, item) for made in asked.made.values() for index, item in enumerate(made)]


@dataclass(frozen=True)
class Probe:
    """One item: its candidates by kind, and what each of them does."""

    task: str
    index: int
    sets: dict[str, list[KeySet]]
    tables: dict[str, pd.DataFrame]
    injected: list[list[int]]
    answered: bool

    @staticmethod
    def of(model: Any, item: Item, index: int, asked: Plan) -> Probe:
        """Observe once, measure every candidate's strength, then all arms over one prefix."""
        from kvprobe.placebo import set_strengths
        from kvprobe.placebo.keysets import text

        seen = Observed.of(model, item)
        rng = np.random.default_rng([asked.seed, index, len(item.prompt)])
        sets = _candidates(seen, asked, rng)
        flat = [keys for each in sets.values() for keys in each]
        pairs = _pairs(sets["contiguous"], asked) if item.task == ESSAY else []
        done = seen.effects([*seen.masks(flat), *_injections(seen, sets["contiguous"], pairs)])
        table = set_strengths(seen.trace, flat, measures=MATCH_ON)[[*MATCH_ON]]
        table = table.assign(spans=[text(keys) for keys in flat]).join(done[: len(flat)])
        kinds = np.repeat([*sets], [len(each) for each in sets.values()])
        tables = {name: _named(table[kinds == name], item.task, index, name) for name in sets}
        if pairs:
            tables["injected"] = _injected_table(tables["contiguous"], pairs, done[len(flat) :], index)
        return Probe(item.task, index, sets, tables, pairs, done.attrs["answered"])

    def groups(self, remedy: str, match_on: str, reading: str, asked: Plan) -> list[list[float]]:
        """Effects of each pseudo-target that has placebos, and of those."""
        if remedy == "injected":
            return self._injected(reading)
        from kvprobe.placebo.pools import disjoint, dissimilar

        choose: Callable[..., Any] = dissimilar if remedy == "hard_set" else disjoint
        names = ["hard", "hard_set"] if remedy == "hard_set" and reading == SINGLE else [remedy]
        sets = [keys for name in names for keys in self.sets[name]]
        strengths, effects = (np.concatenate([self.tables[n][c] for n in names]) for c in (match_on, "effect"))
        targets = range(len(self.sets["hard"])) if len(names) == 2 else None
        found = groups(sets, strengths, choose, asked.placebos, asked.caliper, targets)
        return [effects[group].tolist() for group in found]

    def _injected(self, reading: str) -> list[list[float]]:
        """The first number of each group is a pseudo-target, whose own Δo was injected first."""
        if not self.injected:
            return []
        by_target = self.tables["injected"].groupby("target", sort=False)["effect"]
        found = [values.tolist() for _, values in by_target]
        masked = self.tables["contiguous"]["effect"].tolist()
        return [[masked[pair[0]] if reading == MASKED else row[0], *row[1:]] for pair, row in zip(self.injected, found, strict=True)]


def _candidates(seen: Observed, asked: Plan, rng: np.random.Generator) -> dict[str, list[KeySet]]:
    from kvprobe.placebo.pools import unions

    windows = {"contiguous": draw(seen.room.windows(seen.length), asked.windows, rng)}
    if seen.item.task == MANY:
        many = unions(seen.hard, asked.seed)
        # Small unions first: two that share no needle must be possible.
        order = sorted(rng.permutation(len(many)).tolist(), key=lambda i: len(many[i]))[: asked.unions]
        return {"hard": seen.hard, "hard_set": sorted(many[i] for i in order)}
    return windows | {"token_set": _dealt(seen, asked)} if seen.item.task == ESSAY else windows


def _dealt(seen: Observed, asked: Plan) -> list[KeySet]:
    """Sets of as many single tokens as the needle has, dealt 1 + k at a time, from strong to weak."""
    from kvprobe.placebo.scope import Scope
    from kvprobe.placebo.tokens import single_tokens

    units = single_tokens(Scope(seen.trace), seen.room, "bound")
    hands = 1 + asked.placebos
    last = len(units.spans) - hands * units.count
    if last < 0 or not asked.deals:
        return []
    starts = np.unique(np.geomspace(1, last + 1, asked.deals).astype(int) - 1)
    return list(dict.fromkeys(keys for start in starts.tolist() for keys in units.dealt(start, hands)))


def _pairs(windows: Sequence[KeySet], asked: Plan) -> list[list[int]]:
    """Pseudo-targets, and k windows each whose directions take its place: disjoint ones, whatever their strength."""
    from kvprobe.placebo.keysets import overlap
    from kvprobe.placebo.pools import disjoint

    rng, found = np.random.default_rng([asked.seed, len(windows)]), []
    for t in rng.permutation(len(windows)).tolist():
        others = [j for j in rng.permutation(len(windows)).tolist() if not overlap(windows[j], windows[t])]
        chosen = disjoint([windows[j] for j in others], asked.placebos)
        if len(found) < asked.injected and len(chosen) == asked.placebos:
            found.append([t, *(windows.index(keys) for keys in chosen)])
    return found


def _injections(seen: Observed, windows: Sequence[KeySet], pairs: Sequence[Sequence[int]]) -> list[Any]:
    """Each pseudo-target's own Δo, then the others' directions at its norm, layer by layer and row by row."""
    from kvprobe.interventions import Inject
    from kvprobe.placebo import injection

    rows = [*seen.trace.queries]
    return [(Inject(injection(seen.trace, windows[p[0]], windows[j]), queries=rows),) for p in pairs for j in p]


def _named(table: pd.DataFrame, task: str, index: int, kind: str) -> pd.DataFrame:
    facts = {"task": task, "item": index, "kind": kind, "target": ""}
    return table.assign(**facts).reset_index(drop=True)


def _injected_table(windows: pd.DataFrame, pairs: Any, done: pd.DataFrame, index: int) -> pd.DataFrame:
    """A row an injection: whose direction (``spans``), at whose norm (``target``)."""
    direction = windows.iloc[[j for pair in pairs for j in pair]].reset_index(drop=True)
    target = windows.iloc[[pair[0] for pair in pairs for _ in pair]].reset_index(drop=True)
    table = direction[["spans"]].join(done.reset_index(drop=True))
    facts = {"task": ESSAY, "item": index, "kind": "injected", "target": target["spans"]}
    return table.assign(**facts, perturbation=target["perturbation"])


def row(probes: Sequence[Probe], remedy: str, match_on: str, reading: str, asked: Plan) -> dict[str, Any]:
    """One remedy, matching and reading over all items that have its candidates."""
    kind = "hard" if reading == SINGLE else remedy
    mine = [probe for probe in probes if kind in probe.tables and probe.task != NOISE]
    found = [probe.groups(remedy, match_on, reading, asked) for probe in mine]
    targets = sum(len(probe.injected) if remedy == "injected" else len(probe.sets[kind]) for probe in mine)
    counted = {"targets": targets, "unmatched": targets - sum(map(len, found))}
    named = dict(zip(KEYS, (remedy, match_on, reading), strict=True))
    return named | counted | calibrate([np.array(each) for each in found], asked.draws, asked.seed)

"""Spans that are no evidence, as targets of placebo contrasts: what cutting each of them does, and their placebos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calibrating import groups
from span_effects import ESSAY, MANY, NOISE, Observed, draw

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from kvprobe.placebo import KeySet
    from kvprobe.tasks.items import Item

MATCH_ON = ("bound", "perturbation")
DESIGNS = {"essay": ESSAY, "needles": MANY, "crowd": MANY, "noise": NOISE}
"""Design → its task; ``crowd`` has so many needles that disjoint unions of them exist."""

OWN, MASKED = "own Δo injected", "mask against injected"


@dataclass(frozen=True)
class Reading:
    """One way to replace the target, and where its placebos come from.

    Attributes
    ----------
    remedy, design, name, match_on
        As the table has them.
    single
        Of unions: the pseudo-target is a single needle, which is no placebo.
    sharing
        Of unions: the pseudo-target may share needles with its placebos as they may with each other. The library lets
        placebos share, and keeps the target apart.
    apart
        Of unions: neither do placebos share needles.
    tested
        Of unions: the placebos that the library's primary test uses, those that share no needle with one another.
    """

    remedy: str
    design: str
    name: str
    match_on: str = "perturbation"
    single: bool = False
    sharing: bool = False
    apart: bool = False
    tested: bool = False

    @property
    def kind(self) -> str:
        """Candidates among which the pseudo-target is drawn."""
        return "hard" if self.single else self.remedy


def _both(*named: Any, **more: bool) -> list[Reading]:
    return [Reading(*named, match_on, **more) for match_on in MATCH_ON]


READINGS = (
    *_both("contiguous", "essay", "window"),
    *_both("hard", "crowd", "single H"),
    *_both("hard_set", "needles", "union", tested=True),
    *_both("hard_set", "needles", "union, all k"),
    *_both("hard_set", "needles", "union, shares too", sharing=True),
    *_both("hard_set", "crowd", "union", tested=True),
    *_both("hard_set", "crowd", "union, all k"),
    *_both("hard_set", "crowd", "union, none shares", apart=True),
    *_both("hard_set", "crowd", "single H", single=True, tested=True),
    *_both("token_set", "essay", "token set"),
    *(Reading("injected", "essay", name) for name in (OWN, MASKED)),
)


@dataclass(frozen=True)
class Probe:
    """One item: its candidates by kind, and what each of them does.

    Attributes
    ----------
    design, index, clean, answered
        The item, the clean log-prob of its gold answer, and whether greedy decoding gives it.
    sets, tables
        Kind → candidates, and a row each: strengths, ``effect``, ``kl``, ``flips``; ``injected`` has a table only.
    injected
        Numbers of the windows of each injection: the pseudo-target, then those whose directions take its place.
    """

    design: str
    index: int
    clean: float
    sets: dict[str, list[KeySet]]
    tables: dict[str, pd.DataFrame]
    injected: list[list[int]]
    answered: bool

    @staticmethod
    def of(model: Any, design: str, item: Item, index: int, asked: Any) -> Probe:
        """Observe once, measure every candidate's strength, then all arms over one prefix."""
        import numpy as np

        from kvprobe.placebo import set_strengths
        from kvprobe.placebo.keysets import text

        seen = Observed.of(model, item)
        rng = np.random.default_rng([asked.seed, index, [*DESIGNS].index(design)])
        sets = _candidates(seen, asked, rng)
        flat = [keys for each in sets.values() for keys in each]
        pairs = blocks(sets["contiguous"], asked, rng) if design == "essay" else []
        done = seen.effects([*seen.masks(flat), *_injections(seen, sets.get("contiguous", []), pairs)])
        table = set_strengths(seen.trace, flat, measures=MATCH_ON)[[*MATCH_ON]]
        table = table.assign(spans=[text(keys) for keys in flat]).join(done[: len(flat)])
        kinds = np.repeat([*sets], [len(each) for each in sets.values()])
        tables = {name: _named(table[kinds == name], design, index, name) for name in sets}
        if pairs:
            tables["injected"] = _injected_table(tables["contiguous"], pairs, done[len(flat) :], index)
        return Probe(design, index, done.attrs["clean"], sets, tables, pairs, done.attrs["answered"])

    def groups(self, reading: Reading, asked: Any) -> list[list[float]]:
        """Effects of each pseudo-target that has placebos, and of those."""
        if reading.remedy == "injected":
            return self._injected(reading.name)
        import numpy as np

        from kvprobe.placebo.pools import disjoint, dissimilar

        choose: Callable[..., Any] = dissimilar if reading.remedy == "hard_set" and not reading.apart else disjoint
        names = ["hard", "hard_set"] if reading.single else [reading.remedy]
        sets = [keys for name in names for keys in self.sets[name]]
        strengths, effects = (np.concatenate([self.tables[n][c] for n in names]) for c in (reading.match_on, "effect"))
        targets = range(len(self.sets["hard"])) if reading.single else None
        found = groups(sets, strengths, choose, asked.placebos, asked.caliper, targets, reading.sharing, reading.tested)
        return [effects[group].tolist() for group in found]

    def _injected(self, reading: str) -> list[list[float]]:
        """The first number of each group is a pseudo-target, whose own Δo was injected first."""
        if not self.injected:
            return []
        # In order, not by name: a window may be the pseudo-target of two blocks.
        found = self.tables["injected"]["effect"].to_numpy().reshape(len(self.injected), -1).tolist()
        masked = self.tables["contiguous"]["effect"].tolist()
        own = [masked[pair[0]] if reading == MASKED else row[0] for pair, row in zip(self.injected, found, strict=True)]
        return [[first, *row[1:]] for first, row in zip(own, found, strict=True)]


def _candidates(seen: Observed, asked: Any, rng: np.random.Generator) -> dict[str, list[KeySet]]:
    from kvprobe.placebo.pools import unions

    windows = {"contiguous": draw(seen.room.windows(seen.length), asked.windows, rng)}
    if seen.item.task == MANY:
        many = unions(seen.hard, asked.seed)
        # Small unions first: two that share no needle must be possible.
        order = sorted(rng.permutation(len(many)).tolist(), key=lambda i: len(many[i]))[: asked.unions]
        return {"hard": seen.hard, "hard_set": sorted(many[i] for i in order)}
    return windows | {"token_set": _dealt(seen, asked)} if seen.item.task == ESSAY else windows


def _dealt(seen: Observed, asked: Any) -> list[KeySet]:
    """Sets of as many single tokens as the needle has, dealt 1 + k at a time, from strong to weak."""
    import numpy as np

    from kvprobe.placebo.scope import Scope
    from kvprobe.placebo.tokens import single_tokens

    units = single_tokens(Scope(seen.trace), seen.room, "bound")
    hands = 1 + asked.placebos
    last = len(units.spans) - hands * units.count
    if last < 0 or not asked.deals:
        return []
    starts = np.unique(np.geomspace(1, last + 1, asked.deals).astype(int) - 1)
    return list(dict.fromkeys(keys for start in starts.tolist() for keys in units.dealt(start, hands)))


def blocks(windows: Sequence[KeySet], asked: Any, rng: np.random.Generator) -> list[list[int]]:
    """Blocks of 1 + k disjoint random windows: each is the pseudo-target once, and a direction for the k others.

    Every direction then is the pseudo-target's own as often as anyone's, as a random draw would have it.
    """
    from kvprobe.placebo.pools import disjoint

    found: list[list[int]] = []
    size = 1 + asked.placebos
    for _ in range(asked.blocks):
        order = rng.permutation(len(windows)).tolist()
        chosen = disjoint([windows[i] for i in order], size)
        block = [windows.index(keys) for keys in chosen]
        if len(block) == size and not any(sorted(block) == sorted(other) for other in found):
            found += [[t, *(j for j in block if j != t)] for t in block]
    return found


def _injections(seen: Observed, windows: Sequence[KeySet], pairs: Sequence[Sequence[int]]) -> list[Any]:
    """Each pseudo-target's own Δo, then the others' directions at its norm, layer by layer and row by row."""
    from kvprobe.interventions import Inject
    from kvprobe.placebo import injection

    rows = [*seen.trace.queries]
    return [(Inject(injection(seen.trace, windows[p[0]], windows[j]), queries=rows),) for p in pairs for j in p]


def _named(table: pd.DataFrame, design: str, index: int, kind: str) -> pd.DataFrame:
    facts = {"design": design, "item": index, "kind": kind, "target": ""}
    return table.assign(**facts).reset_index(drop=True)


def _injected_table(windows: pd.DataFrame, pairs: Any, done: pd.DataFrame, index: int) -> pd.DataFrame:
    """A row an injection: whose direction (``spans``), at whose norm (``target``)."""
    direction = windows.iloc[[j for pair in pairs for j in pair]].reset_index(drop=True)
    target = windows.iloc[[pair[0] for pair in pairs for _ in pair]].reset_index(drop=True)
    table = direction[["spans"]].join(done.reset_index(drop=True))
    facts = {"design": "essay", "item": index, "kind": "injected", "target": target["spans"]}
    return table.assign(**facts, perturbation=target["perturbation"])

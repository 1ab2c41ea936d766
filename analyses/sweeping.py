"""What the analyses of the second stage's settings share: options, checks, and one table of sweep and scores."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common import document_options, progress, reading, words

if TYPE_CHECKING:
    import pandas as pd

    from kvprobe.audits import Sweep
    from kvprobe.cells.reading import Reading
    from kvprobe.tasks.document import Document

CACHES = ("0.1", "0.2")
PRESETS = ("paper", "released")
SCORES = {"ci_low": "score_low", "ci_high": "score_high", "n": "items"}
"""Columns of the scores that would be taken for those of the sweep → their names beside them."""


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a run; ``items`` of 0: no scores."""

    sweeps: tuple[Sweep, ...]
    reading: Reading
    caches: tuple[str, ...] = CACHES
    measured: tuple[int, ...] = (1,)
    task: str = "niah_single_1"
    items: int = 8
    item_length: int = 1000
    seed: int = 0
    setting: str = "context"

    @property
    def scored(self) -> dict[str, Any]:
        """What the scores are asked with."""
        names = {"task": self.task, "items": self.items, "length": self.item_length}
        return names | {"seed": self.seed, "setting": self.setting}

    def validate(self, model: Any) -> list[Document]:
        """Read the documents, and refuse what can be refused: an hour must not end in a mistake of its beginning."""
        from kvprobe import curves
        from kvprobe.audits.sweeps import refuse_sweep, score_settings
        from kvprobe.theory.checks import check_p

        for p in self.measured:
            check_p(p)
        documents = self.reading.documents(model)
        for sweep in self.sweeps:
            refuse_sweep(model, documents, sweep, self.reading.probe, self.caches)
            if self.items:
                curves.validate(model, score_settings(sweep, self.caches, **self.scored))
        return documents

    def stops(self, model: Any, documents: Sequence[Document]) -> list[int]:
        """Number of compressed tokens of each document."""
        from kvprobe import cells

        return [cells.fitting(model, each, self.reading.probe)[0] for each in documents]


def options(parser: argparse.ArgumentParser, base: str) -> None:
    """Documents, policies, sizes and the task of the scores."""
    document_options(parser)
    parser.add_argument("--base", default=base, help="policy without a second stage (%(default)s)")
    for option, default in (("presets", PRESETS), ("caches", CACHES)):
        parser.add_argument(f"--{option}", type=words, default=default, help=f"comma-separated ({','.join(default)})")
    parser.add_argument("--task", default="niah_single_1", help="task of the scores (%(default)s)")
    parser.add_argument("--items", type=int, default=8, help="items of the task, 0 for no scores (%(default)s)")
    parser.add_argument("--item-length", type=int, default=1000, help="tokens of an item (%(default)s)")
    parser.add_argument("--setting", default="context", help="context (question unseen) or joint (%(default)s)")


def plan(model: Any, kind: str, values: Sequence[float], asked: dict[str, Any], base: str, **settings: Any) -> Plan:
    """A plan from options, checked; ``settings`` go to the second stage."""
    from kvprobe.audits import Sweep
    from kvprobe.cells import pairs_of
    from kvprobe.errors import EvictionError

    asked = dict(asked)
    read = reading(asked)
    base, presets = asked.pop("base", base), asked.pop("presets", PRESETS)
    if "two_stage" in base:
        raise EvictionError(f"base {base} has a second stage already; allowed: policies without one")
    pairs = pairs_of(base, f"{base}+two_stage", presets, **settings)
    planned = Plan(tuple(Sweep(kind, pair, tuple(values)) for pair in pairs), read, **asked)
    planned.validate(model)
    return planned


def table(model: Any, planned: Plan, compared: Callable[[Sweep], Sweep] | None = None) -> pd.DataFrame:
    """One row a preset × cache × value × norm of L: :func:`kvprobe.audits.sweep` with the scores beside it.

    ``compared`` turns a sweep into another one over the same policies: ``attrs["tables"]["direct"]`` has its rows.

    ``attrs["tables"]["scores"]``: the scores by themselves, with those of no second stage; ``attrs["about"]``: model,
    documents, probe, seed.
    """
    import pandas as pd

    documents = planned.validate(model)
    parts, direct, scored = [], [], []
    for each in planned.sweeps:
        name = f"{each.kind} {each.pair.preset}"
        cells = swept(model, documents, planned, each, name)
        parts += rows(model, documents, planned, each, cells)
        direct += rows(model, documents, planned, compared(each), cells) if compared else []
        if planned.items:
            scored.append(_scores(model, planned, each, name))
    found, tables = pd.concat(parts, ignore_index=True), {}
    if direct:
        tables["direct"] = pd.concat(direct, ignore_index=True)
    if scored:
        tables["scores"] = pd.concat(scored, ignore_index=True)
        beside = tables["scores"].rename(columns=SCORES).drop(columns="sweep")
        found = found.merge(beside, on=["preset", "cache", "value"], how="left", validate="many_to_one")
    found.attrs = {"tables": tables, "about": _about(model, planned, documents)}
    return found


def swept(model: Any, documents: Sequence[Document], planned: Plan, what: Sweep, name: str) -> dict[int, pd.DataFrame]:
    """The cells of one sweep, in every norm of L."""
    from kvprobe.audits.sweeps import sweep_cells

    more: dict[str, Any] = {"probe": planned.reading.probe, "norms": planned.measured, "progress": progress(name)}
    return sweep_cells(model, documents, what, planned.caches, **more)


def rows(
    model: Any, documents: Sequence[Document], planned: Plan, what: Sweep, cells: dict[int, pd.DataFrame]
) -> list[pd.DataFrame]:
    """One table a norm of L."""
    from kvprobe.audits.sweeps import sweep_rows

    stops = planned.stops(model, documents)
    return [sweep_rows(cells[p], what, planned.caches, stops, planned.seed).assign(measured=p) for p in cells]


def _scores(model: Any, planned: Plan, what: Sweep, name: str) -> pd.DataFrame:
    from kvprobe.audits.sweeps import scores

    rows = scores(model, what, planned.caches, progress=progress(f"{name} {planned.task}"), **planned.scored)
    rows.attrs = {}
    return rows


def _about(model: Any, planned: Plan, documents: list[Document]) -> dict[str, Any]:
    policies = [[each.to_dict() for each in (sweep.pair.base, *sweep.policies)] for sweep in planned.sweeps]
    about = {"model": model.name, "norm": planned.measured[0], "seed": planned.seed, "policies": policies}
    return about | planned.reading.describe(documents, planned.stops(model, documents))


def plot(df: pd.DataFrame) -> Any:
    """The sweep's figure."""
    from common import plain

    from kvprobe.plots import sweep_curves

    return sweep_curves(plain(df), df.attrs["tables"].get("scores"), df.attrs["about"])


def report(df: pd.DataFrame, paper: str) -> None:
    """Print the table for a person."""
    about, tokens = df.attrs["about"], df.attrs["about"]["tokens"]
    print(
        f"{about['model']}, {about['n_docs']} documents ({about['docs']}) of {tokens['min']}–{tokens['max']} tokens, "
        f"probe {about['probe']}. change: L − L without a second stage, mean over heads [95 % over documents]."
    )
    print(f"\n{about['semantics']}")
    scored = df.attrs["tables"].get("scores")
    for (base, preset, cache, p), rows in df.groupby(["base", "preset", "cache", "measured"], sort=False):
        print(f"\n{base}+two_stage, {preset}, cache {100 * cache:.3g} %, L{p}: without, {rows['base_L'].iloc[0]:.4g}")
        for row in rows.to_dict("records"):
            print(_line(row) + ("" if scored is None else _score(row, "score_low", "score_high")))
        if scored is not None and p == df["measured"].iloc[0]:
            none = scored[(scored["preset"] == preset) & (scored["cache"] == cache) & scored["value"].isna()].iloc[0]
            print(f"{'none':>8s}" + " " * 58 + _score(none, "ci_low", "ci_high"))
    print(f"\n{paper}")


def _line(row: dict[str, Any]) -> str:
    ends = _ends(row["ci_low"], row["ci_high"], "+.3g")
    heads = f"{100 * row['heads_reduced']:.0f} % of heads reduced"
    return f"{row['value']:8g}  L {row['L']:8.4g}  change {row['change']:+8.3g} {ends:18s} {heads:24s}"


def _score(row: Any, low: str, high: str) -> str:
    logprob = f"Δ ln p {row['delta_logprob']:+.2f} {_ends(row['logprob_low'], row['logprob_high'], '+.2f')}"
    return f"  score {row['score']:.2f} {_ends(row[low], row[high], '.2f')}  {logprob}"


def _ends(low: float, high: float, form: str) -> str:
    return "[no interval]" if low != low else f"[{low:{form}}, {high:{form}}]"

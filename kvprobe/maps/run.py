"""Run a list of documents and lay everything out in tidy tables."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from kvprobe import cells
from kvprobe import parts as kept
from kvprobe.cells import Cells
from kvprobe.cells.pairs import COLUMNS, Pair
from kvprobe.eviction.policies import ratio
from kvprobe.maps.settings import Settings
from kvprobe.maps.summary import budget_rows, head_rows, layer_rows, summarise
from kvprobe.maps.tables import Progress, changes
from kvprobe.tasks.document import Document


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes
    ----------
    heads
        Every cell: :func:`kvprobe.maps.per_head` at all sizes, with ``preset`` in front.
    layers
        :func:`kvprobe.maps.per_layer` at the main size, with ``preset`` and ``measure``: all three of them, or
        ``"local"`` alone where that is what was asked for (nothing is run then).
    summary
        What the command prints.
    """

    settings: Settings
    heads: pd.DataFrame
    layers: pd.DataFrame
    summary: dict[str, Any]

    def head_rows(self) -> pd.DataFrame:
        """One row a preset × layer × head at the main size: means, difference, Wilcoxon's p."""
        main = self.heads[self.heads["cache"] == float(ratio(self.settings.cache))]
        return _by_preset(main, head_rows)

    def layer_rows(self) -> pd.DataFrame:
        """One row a preset × layer: means, and the reduction with its interval."""
        chosen = self.layers[self.layers["measure"] == self.settings.measure]
        return _by_preset(chosen, lambda table: layer_rows(table, self.settings.seed))

    def budget_rows(self) -> pd.DataFrame:
        """One row a preset × size: means over heads, the reduction and the share of heads reduced."""
        asked = self.heads[self.heads["cache"].isin(self.summary["caches"])]
        return _by_preset(asked, lambda table: budget_rows(table, self.settings.seed))


def run(model: Any, settings: Settings, progress: Progress = iter, keep: kept.Keep = kept.afresh) -> Result:
    """Map the documents of ``settings``.

    Parameters
    ----------
    progress
        Wraps the documents (tqdm, for instance).
    keep
        Stores what each document gives, for a run that goes on later (:class:`kvprobe.parts.Parts`); by default
        nothing.

    Raises
    ------
    EvictionError, PromptError, TaskError, DataError
        Before anything is run.
    """
    documents = validate(model, settings)
    begun = time.perf_counter()
    caches, left_out = settings.caches(model, *cells.extent(model, documents, settings.reading.probe))
    parts = [
        keep(f"document {number}", partial(_document, model, settings, caches, document))
        for number, document in enumerate(progress(documents))
    ]
    table = cells.joined(part for part, _, _ in parts)
    runs = [each for _, each, _ in parts if each is not None]
    ran = pd.concat(runs, ignore_index=True) if runs else None
    heads = _pairs(settings, table.heads, COLUMNS)
    layers = _layers(settings, table.layers, ran)
    stops = [cells.fitting(model, each, settings.reading.probe)[0] for each in documents]
    about = settings.reading.describe(documents, stops) | {
        "cache": float(ratio(settings.cache)),
        "caches": [float(ratio(cache)) for cache in caches],
        "caches_left_out": [float(ratio(cache)) for cache in left_out],
        "notes": unique(note for _, _, notes in parts for note in notes),
        "measure": settings.measure,
        "norm": settings.norm,
        "seed": settings.seed,
        "policies": [[each.to_dict() for each in (pair.base, pair.ours)] for pair in settings.pairs],
    }
    found = summarise(settings, heads, layers, about["caches"])
    timings = {"documents_s": time.perf_counter() - begun}
    return Result(settings, heads, layers, found | about | {"timings_s": timings})


def validate(model: Any, settings: Settings) -> list[Document]:
    """Read the documents, and refuse everything that can be refused before anything is computed or written."""
    documents = settings.reading.documents(model)
    settings.refuse(model, documents)
    return documents


def _document(
    model: Any, settings: Settings, caches: list[str], document: Document
) -> tuple[Cells, pd.DataFrame | None, list[dict[str, Any]]]:
    """All cells of one document, its runs at the main size where they are asked for, and the policies' notes."""
    policies = [policy for pair in settings.pairs for policy in pair.policies]
    probed = cells.probe(model, document, policies, settings.reading.probe)
    sizes = {ratio(cache): cache for cache in (settings.cache, *caches)}
    arms = settings.arms(list(sizes.values()))
    choices = cells.choose(probed, arms)
    found = cells.measure(probed, arms, p=settings.norm, choices=choices)
    main = [place for place, arm in enumerate(arms) if ratio(arm.cache) == ratio(settings.cache)]
    notes = cells.noted(arms, choices)
    if settings.measure == "local":
        return found, None, notes
    ran = changes(model, probed, [arms[i] for i in main], [choices[i] for i in main], settings.norm)
    return found, ran, notes


def _pairs(settings: Settings, table: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    return pd.concat([_named(pair, pair.columns(table, names)) for pair in settings.pairs], ignore_index=True)


def _layers(settings: Settings, local: pd.DataFrame, ran: pd.DataFrame | None) -> pd.DataFrame:
    """All measures that there are, at the main size."""
    main = local[local["cache"] == float(ratio(settings.cache))]
    sources = [("local", main, "perturbation")]
    sources += [] if ran is None else [(name, ran, name) for name in ("attn_out", "hidden")]
    parts = []
    for measure, table, column in sources:
        found = _pairs(settings, table, {column: ""}).rename(columns={"_base": "base", "_ours": "ours"})
        found.insert(1, "measure", measure)
        parts.append(found)
    return pd.concat(parts, ignore_index=True)


def _named(pair: Pair, table: pd.DataFrame) -> pd.DataFrame:
    table.insert(0, "preset", pair.preset)
    return table


def _by_preset(table: pd.DataFrame, summary: Any) -> pd.DataFrame:
    parts: Iterable[pd.DataFrame] = [
        summary(group).assign(preset=preset) for preset, group in table.groupby("preset", sort=False)
    ]
    return pd.concat(parts, ignore_index=True)


def unique(notes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each note once, in the order in which they came up."""
    found: list[dict[str, Any]] = []
    for note in notes:
        if note not in found:
            found.append(note)
    return found

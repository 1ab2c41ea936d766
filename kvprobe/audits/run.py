"""Run a list of documents and lay everything out in tidy tables."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from kvprobe import cells, curves, parts, published
from kvprobe.audits.settings import Settings
from kvprobe.audits.summary import layer_rows, rows
from kvprobe.audits.sweeps import refuse_sweep, score_settings, scores, sweep
from kvprobe.audits.tables import Progress, by_head, by_layer
from kvprobe.cells import Cells
from kvprobe.eviction.policies import ratio
from kvprobe.tasks.document import Document


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes
    ----------
    heads, layers
        Every cell: :func:`kvprobe.audit` by head and by layer.
    sweeps, scores
        :func:`kvprobe.audits.sweep` and its scores, None where none were asked for.
    summary
        What the command prints.
    """

    settings: Settings
    heads: pd.DataFrame
    layers: pd.DataFrame
    sweeps: pd.DataFrame | None
    scores: pd.DataFrame | None
    summary: dict[str, Any]

    def rows(self) -> pd.DataFrame:
        """One row a preset × base × cache × level (Table 9); what is said of Assumption 3.4 as plain columns."""
        flat = []
        for row in self.summary["rows"]:
            held = {name: value for name, value in row["assumption"].items() if not isinstance(value, list)}
            flat.append({name: value for name, value in row.items() if name != "assumption"} | held)
        return pd.DataFrame(flat)

    def sigmas(self) -> pd.DataFrame:
        """σ of every first stage under Algorithm 1: one row a preset × base × document × cache × layer × head."""
        columns = ["doc", "cache", "layer", "head", "stage1", "sigma", "sigma_oracle"]
        parts = []
        for pair in self.settings.pairs:
            mine = self.heads.loc[self.heads["policy"] == pair.policies[1].name, columns]
            parts.append(mine.assign(preset=pair.preset, base=pair.base.name))
        return pd.concat(parts, ignore_index=True)

    def layer_rows(self) -> pd.DataFrame:
        """One row a preset × base × cache × layer: how tight θ and θ_c are."""
        return layer_rows(self.layers, self.settings.pairs, self.settings.seed)


def run(model: Any, settings: Settings, progress: Progress = iter, keep: parts.Keep = parts.afresh) -> Result:
    """Audit the documents of ``settings``.

    Parameters
    ----------
    progress
        Wraps the documents (tqdm, for instance).
    keep
        Stores what each document and each item of a sweep gives, for a run that goes on later
        (:class:`kvprobe.parts.Parts`); by default nothing.

    Raises
    ------
    EvictionError, PromptError, TaskError, DataError
        Before anything is run.
    """
    documents = validate(model, settings)
    begun = time.perf_counter()
    found = cells.joined(
        keep(f"document {number}", partial(_document, model, settings, document))
        for number, document in enumerate(progress(documents))
    )
    heads, layers = by_head(found), by_layer(found)
    audited = time.perf_counter()
    swept, scored = _sweeps(model, settings, documents, progress, keep)
    stops = [cells.fitting(model, each, settings.reading.probe)[0] for each in documents]
    about = settings.reading.describe(documents, stops) | {
        "caches": [float(ratio(cache)) for cache in settings.caches],
        "presets": list(dict.fromkeys(pair.preset for pair in settings.pairs)),
        "norm": settings.norm,
        "seed": settings.seed,
        "policies": [[each.to_dict() for each in (pair.base, pair.ours)] for pair in settings.pairs],
    }
    table = rows(heads, layers, settings.pairs, settings.levels, settings.seed)
    timings = {"documents_s": audited - begun, "sweeps_s": time.perf_counter() - audited}
    summary = {"rows": table, "violations": sum(row["violations"] for row in table)} | about
    summary |= {"sweeps": _records(swept), "scores": _records(scored), "timings_s": timings}
    summary |= {"published": published.audited(about["presets"], settings.reading.probe, settings.norm)}
    return Result(settings, heads, layers, swept, scored, summary)


def validate(model: Any, settings: Settings) -> list[Document]:
    """Read the documents, and refuse everything that can be refused before anything is computed or written."""
    documents = settings.reading.documents(model)
    settings.refuse(model, documents)
    for what in settings.swept():
        refuse_sweep(model, documents, what, settings.reading.probe, settings.sweep_caches)
        if settings.items:
            curves.validate(model, score_settings(what, settings.sweep_caches, **settings.scored))
    return documents


def _document(model: Any, settings: Settings, document: Document) -> Cells:
    policies = [policy for pair in settings.pairs for policy in pair.policies]
    probed = cells.probe(model, document, policies, settings.reading.probe)
    return cells.measure(probed, settings.arms, p=settings.norm, stages=True)


def _sweeps(
    model: Any, settings: Settings, documents: list[Document], progress: Progress, keep: parts.Keep
) -> tuple[pd.DataFrame | None, pd.DataFrame | None]:
    if not settings.sweeps:
        return None, None
    swept, scored = [], []
    for what in settings.swept():
        common: dict[str, Any] = {"progress": progress, "keep": parts.under(keep, f"{what.kind} of {what.pair.preset}")}
        how: dict[str, Any] = {"probe": settings.reading.probe, "p": settings.norm, "seed": settings.seed}
        swept.append(sweep(model, documents, what, settings.sweep_caches, **how, **common))
        if settings.items:
            scored.append(scores(model, what, settings.sweep_caches, **common, **settings.scored))
    return pd.concat(swept, ignore_index=True), pd.concat(scored, ignore_index=True) if scored else None


def _records(table: pd.DataFrame | None) -> list[dict[str, Any]]:
    records: list[Any] = [] if table is None else table.to_dict("records")
    return records

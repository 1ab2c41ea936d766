"""A run over many inputs: its tables and its summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvprobe import parts
from kvprobe.errors import TaskError
from kvprobe.sinks.probe import Probed, probe_case
from kvprobe.sinks.settings import ESSAYS, LENGTH, QUERIES, Case, Settings
from kvprobe.sinks.summary import summarise

if TYPE_CHECKING:
    import pandas as pd

SEMANTICS = {
    "task": "observed in clean runs, the answer teacher-forced; nothing is masked",
    "documents": "observed in clean runs of the documents; nothing is masked",
    "after": "; 'after': prefill-then-evict, the evidence is masked for question and answer tokens",
}


@dataclass(frozen=True)
class Result:
    """A finished run: what each input gave, and the summary."""

    settings: Settings
    probes: tuple[Probed, ...]
    summary: dict[str, Any]

    def tables(self) -> dict[str, pd.DataFrame]:
        """Name → table; each but ``items`` has a column ``item``. Tables of what was not measured are left out."""
        import pandas as pd

        found = {"items": pd.DataFrame([self._item(probe) for probe in self.probes])}
        for name in ("buckets", "tokens", "sinks", "after", "courses"):
            found[name] = self._joined([(probe, getattr(probe, name)) for probe in self.probes])
        found["secondary"] = self._joined([(probe, probe.secondary_table) for probe in self.probes])
        found["epsilon"] = self._joined([(probe, pd.json_normalize(probe.epsilon, sep="_")) for probe in self.probes])
        return {name: table for name, table in found.items() if len(table.columns)}

    @staticmethod
    def _item(probe: Probed) -> dict[str, Any]:
        aurocs = {
            f"auroc_{name}_{where}": value for where, found in probe.auroc.items() for name, value in found.items()
        }
        return probe.facts | aurocs | probe.timings

    @staticmethod
    def _joined(parts: Sequence[tuple[Probed, pd.DataFrame | None]]) -> pd.DataFrame:
        import pandas as pd

        found = [(probe.facts["index"], table) for probe, table in parts if table is not None]
        if not found:
            return pd.DataFrame()
        for index, table in found:
            if "item" not in table:
                table.insert(0, "item", index)
        return pd.concat([table for _, table in found], ignore_index=True)


def run(
    model: Any,
    settings: Settings,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    keep: parts.Keep = parts.afresh,
) -> Result:
    """Score every key of every input.

    Parameters
    ----------
    progress
        Wraps the inputs (tqdm, for instance).
    keep
        Stores what each input gives, for a run that goes on later (:class:`kvprobe.parts.Parts`); by default nothing.

    Raises
    ------
    TaskError
        See :func:`validate`.
    """
    cases = validate(model, settings)
    begun = time.perf_counter()
    unit = "item" if settings.task else "document"
    probes = tuple(keep(f"{unit} {case.index}", partial(probe_case, model, settings, case)) for case in progress(cases))
    timings = {name: sum(probe.timings[name] for probe in probes) for name in probes[0].timings}
    timings["items_s"] = time.perf_counter() - begun
    summary = describe(settings, cases) | summarise(probes, settings) | {"timings_s": timings}
    return Result(settings, probes, summary)


def validate(model: Any, settings: Settings) -> Sequence[Case]:
    """Make the inputs; refuse everything that can be refused before anything is computed or written.

    Raises
    ------
    TaskError
        Layers that the model does not have or that leave none, and whatever :func:`kvprobe.tasks.make` or
        :func:`kvprobe.tasks.documents` refuses.
    """
    n_layers = model.geometry.n_layers
    outside = [layer for layer in settings.exclude_layers if not 0 <= layer < n_layers]
    if outside:
        raise TaskError(f"exclude_layers names {outside}, the model has layers 0 … {n_layers - 1}")
    if len(set(settings.exclude_layers)) == n_layers:
        raise TaskError(f"exclude_layers names all {n_layers} layers, must leave at least one")
    return settings.cases(model)


def describe(settings: Settings, cases: Sequence[Case]) -> dict[str, Any]:
    """What a summary says of the inputs."""
    tokens = [len(case.prompt) for case in cases]
    docs = None if settings.task else (ESSAYS if settings.docs is None else _name(settings.docs))
    return {
        "task": settings.task,
        "docs": docs,
        "n_items": len(cases),
        "unit": "item" if settings.task else "document",
        "length": settings.length or LENGTH,
        "tokens": {"min": min(tokens), "max": max(tokens)},
        "truncated": sum(case.truncated for case in cases),
        "seed": settings.seed,
        "queries": settings.rows,
        "rows": QUERIES[settings.rows] if settings.task or settings.rows == "all" else "question",
        "semantics": SEMANTICS["task" if settings.task else "documents"]
        + (SEMANTICS["after"] if settings.with_after else ""),
        "settings": asdict(settings) | {"docs": docs, "queries": settings.rows},
    }


def _name(docs: Any) -> str:
    return "given texts" if isinstance(docs, (list, tuple)) else str(docs)

"""What every experiment's command does around its run: load, validate, time, store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprobe import records
from kvprobe.commands.console import progress
from kvprobe.versions import versions

Write = Callable[[records.Run, Any, dict[str, Any]], None]


@dataclass(frozen=True)
class Experiment:
    """One experiment as a command.

    Attributes
    ----------
    command
        Its name, for the manifest.
    package
        The package with ``validate(model, settings)`` and ``run(model, settings, progress)``, whose result has a
        ``summary`` with ``semantics`` and ``timings_s``.
    settings, described
        What ``run`` gets, and the same as plain values for the manifest.
    write
        Writes tables and figures of (run folder, result, summary).
    unit
        What the progress bar counts.
    """

    command: str
    package: Any
    settings: Any
    described: Callable[[dict[str, Any]], dict[str, Any]]
    write: Write
    unit: str = "items"

    def perform(self, name: str, out: Path | None, arguments: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Run it on a model; with ``out``, write tables, figures, summary and a manifest there."""
        from kvprobe.models import load

        begun = time.perf_counter()
        model = load(name)
        self.package.validate(
            model, self.settings
        )  # an earlier run's folder is not touched before the input is accepted
        if out is None:
            return self._run(model, None, begun)
        seed = self.settings.seed
        with records.run(out, command=self.command, arguments=arguments, seed=seed, model=name) as run:
            return self._run(model, run, begun)

    def _run(self, model: Any, run: records.Run | None, begun: float) -> tuple[dict[str, Any], Any]:
        loaded = time.perf_counter()
        result = self.package.run(model, self.settings, progress(self.unit))
        processing = model.report.processing
        summary = {"model": model.name, "dtype": model.meta["dtype"], "processing": processing} | result.summary
        summary["timings_s"] = {"load_s": loaded - begun} | result.summary["timings_s"]
        if run is not None:
            drawn = time.perf_counter()
            self.write(run, result, summary)
            settings = self.described(summary)
            run.update(weight_processing=processing, settings=settings, semantics=summary["semantics"])
            summary["timings_s"]["write_s"] = time.perf_counter() - drawn
        summary["timings_s"]["total_s"] = time.perf_counter() - begun
        summary |= {"peak_rss_mib": records.peak_rss_mib(), "versions": versions()}
        if run is not None:
            run.json(summary, "summary.json")
        return summary, result

"""What every experiment's command does around its run: load, validate, time, store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprobe import parts, records
from kvprobe.commands.console import progress
from kvprobe.records.asked import weights
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
        The package with ``validate(model, settings)`` and ``run(model, settings, progress, keep)``, whose result has a
        ``summary`` with ``semantics`` and ``timings_s``.
    settings, described
        What ``run`` gets, and the same as plain values for the manifest.
    write
        Writes tables and figures of (run folder, result, summary).
    unit
        What the progress bar counts, and what the parts of an unfinished run are called: ``item 0``, ``item 1``, …
    """

    command: str
    package: Any
    settings: Any
    described: Callable[[dict[str, Any]], dict[str, Any]]
    write: Write
    unit: str = "items"

    def perform(self, name: str, out: Path | None, arguments: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Run it on a model; with ``out``, write tables, figures, summary and a manifest there.

        A run that was ended there and asked the same is gone on with.
        """
        from kvprobe.models import load

        begun = time.perf_counter()
        model = load(name)
        self.package.validate(
            model, self.settings
        )  # an earlier run's folder is not touched before the input is accepted
        if out is None:
            return self._run(model, None, begun)
        about: dict[str, Any] = {"seed": self.settings.seed, "model": name, "identity": _identity(model, name)}
        with records.run(out, command=self.command, arguments=arguments, **about) as run:
            return self._run(model, run, begun)

    def _run(self, model: Any, run: records.Run | None, begun: float) -> tuple[dict[str, Any], Any]:
        loaded = time.perf_counter()
        keep = parts.afresh if run is None else run.keep
        result = self.package.run(model, self.settings, self._bar(run), keep=keep)
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

    def _bar(self, run: records.Run | None) -> Callable[[Iterable[Any]], Iterable[Any]]:
        """The progress bar; what goes through it first says how many there are, and so how far an earlier run came."""
        bar = progress(self.unit)

        def shown(things: Iterable[Any]) -> Iterable[Any]:
            listed = list(things)
            if run is not None:
                run.resuming(len(listed), self.unit)
            return bar(listed)

        return shown


def _identity(model: Any, name: str) -> dict[str, Any]:
    """What tells a model from another of its name: revision, a folder's files, precision and place."""
    about = {"revision": model.revision, "files": weights(name), "device": str(model.device)}
    return about | {key: model.meta[key] for key in ("dtype", "processing")}

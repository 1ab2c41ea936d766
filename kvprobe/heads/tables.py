"""A finished scan in tidy tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe import parts
from kvprobe.heads.measuring import SEMANTICS, Scan, scanned
from kvprobe.heads.scanning import gather
from kvprobe.heads.settings import Settings
from kvprobe.heads.summary import by_seed, summarise

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Result:
    """A finished run: what was measured, the summary, and its tables."""

    settings: Settings
    scan: Scan
    summary: dict[str, Any]

    def tables(self) -> dict[str, pd.DataFrame]:
        """``heads``, ``trials``, ``layers``; ``causal`` and ``knockouts`` where they were run."""
        import pandas as pd

        found = {"heads": self.heads(), "trials": self.trials(), "layers": pd.DataFrame(self.scan.rule["layers"])}
        found |= {} if self.scan.causal is None else {"causal": self.scan.causal.rows}
        return found | ({} if self.scan.single is None else {"knockouts": self.scan.single})

    def heads(self) -> pd.DataFrame:
        """One row a head: both scores, the retrieval score by seed, and what the first-layer rule looks at."""
        import pandas as pd

        shape = np.array(self.scan.profiles["retrieval"].scores).shape
        layer, head = (grid.ravel() for grid in np.indices(shape))
        frame = pd.DataFrame({"layer": layer, "head": head})
        for kind, scores in self.scan.scores.items():
            frame[kind] = np.nan if scores is None else scores.ravel()
        for seed in self.settings.grid.seeds:
            trials = by_seed(self.scan.trials, seed)
            kept = any(each.kept("retrieval") for each in trials)
            frame[f"retrieval_seed_{seed}"] = gather(trials).scores.ravel() if kept else np.nan
        for name in ("entropy", "relative_entropy", "top_mass"):
            frame[name] = np.asarray(self.scan.rule[name]).ravel()
        return frame.assign(excluded=np.isin(layer, self.scan.rule["excluded"]))

    def trials(self) -> pd.DataFrame:
        """One row a score × trial: where one task gives both scores, each of its trials stands twice."""
        import pandas as pd

        rows = []
        for kind in ("retrieval", "reasoning"):
            rows += [
                {"score": kind, "task": self.summary[kind]["task"]} | _row(each, kind) for each in self.scan.of(kind)
            ]
        return pd.DataFrame(rows)


def _row(trial: Any, kind: str) -> dict[str, Any]:
    names = ("tokens", "gold", "text", "recall", "f1", "seconds")
    return asdict(trial.cell) | {name: getattr(trial, name) for name in names} | {"kept": trial.kept(kind)}


def run(
    model: Any,
    settings: Settings,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    keep: parts.Keep = parts.afresh,
) -> Result:
    """Scan the heads of a model (see :class:`Settings`).

    Parameters
    ----------
    progress
        Wraps the trials (tqdm, for instance).
    keep
        Stores trials, items of the causal check and the single heads, for a run that goes on later
        (:class:`kvprobe.parts.Parts`); by default nothing.
    """
    begun = time.perf_counter()
    scan = scanned(model, settings, progress, keep)
    about = {
        "task": settings.grid.task,
        "lengths": list(settings.grid.lengths),
        "depths": list(settings.grid.depths),
        "needles": settings.grid.needles,
        "seed": settings.seed,
        "norm": settings.p,
        "semantics": SEMANTICS,
        "settings": asdict(settings),
    }
    timings = scan.timings | {"run_s": time.perf_counter() - begun}
    return Result(settings, scan, about | summarise(scan) | {"timings_s": timings})

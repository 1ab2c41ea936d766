"""Run a list of items and lay everything out in tidy tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvprobe import parts
from kvprobe.curves.answers import Answers, answer_item
from kvprobe.curves.settings import Settings
from kvprobe.curves.sizes import refuse
from kvprobe.curves.summary import summarise, worst_receipt
from kvprobe.errors import TaskError
from kvprobe.eviction.budgets import read_profile

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Result:
    """A finished run: all answers, and the summary."""

    settings: Settings
    items: tuple[Answers, ...]
    summary: dict[str, Any]

    def answers(self) -> pd.DataFrame:
        """One row an item × policy × cache: kept share, score, log-probability of the gold answer, text."""
        return _frame(self.items).drop(columns="notes")

    def rows(self) -> pd.DataFrame:
        """One row a policy × cache: mean score with its interval."""
        import pandas as pd

        return pd.DataFrame(self.summary["rows"]).drop(columns="notes", errors="ignore")

    def pairs(self) -> pd.DataFrame:
        """One row a policy with a second stage × cache × measure: the paired difference from the one without."""
        import pandas as pd

        columns = ("policy", "base", "cache", "measure", "difference", "ci_low", "ci_high", "n", "p_sign_flip")
        return pd.DataFrame(self.summary["pairs"], columns=[*columns, "p_attainable"])


def run(
    model: Any,
    settings: Settings,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    keep: parts.Keep = parts.afresh,
) -> Result:
    """Answer ``settings.items`` items from every cache.

    Parameters
    ----------
    progress
        Wraps the item numbers (tqdm, for instance).
    keep
        Stores what each item gives, for a run that goes on later (:class:`kvprobe.parts.Parts`); by default nothing.

    Raises
    ------
    TaskError, EvictionError, PromptError
        No items, or a policy that cannot do what is asked of it; before anything is run.
    """
    validate(model, settings)
    begun = time.perf_counter()
    items = tuple(
        keep(f"item {index}", partial(answer_item, model, settings, index)) for index in progress(range(settings.items))
    )
    timings = {name: sum(item.timings[name] for item in items) for name in items[0].timings}
    timings["items_s"] = time.perf_counter() - begun
    answers = [answer for item in items for answer in item.answers]
    about = {
        "task": settings.task,
        "length": settings.length,
        "n_items": len(items),
        "seed": settings.seed,
        "setting": settings.setting,
        "semantics": settings.semantics,
        "policies": [policy.to_dict() for policy in settings.policies],
        "smallest_retained": worst_receipt(answers),
    }
    return Result(settings, items, about | summarise(_frame(items), settings) | {"timings_s": timings})


def validate(model: Any, settings: Settings) -> None:
    """Refuse everything that can be refused before anything is computed or written (see :func:`run`)."""
    if settings.items < 1:
        raise TaskError(f"items is {settings.items}, must be a whole number of at least 1")
    if settings.profile is not None:
        read_profile(settings.profile, model.name)
    refuse(model, settings, [settings.item(model, index) for index in range(settings.items)])


def _frame(items: Iterable[Answers]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame([asdict(answer) for item in items for answer in item.answers])

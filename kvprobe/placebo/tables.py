"""Run a list of items and lay everything out in tidy tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe import inputs, parts
from kvprobe.errors import TaskError, quote
from kvprobe.placebo.memory import memory_summary, mention_frame, probe_trace, trace_windows
from kvprobe.placebo.probe import Probed, decoded, item_windows, probe_item
from kvprobe.placebo.settings import MATCH_ON, Settings
from kvprobe.placebo.summary import balance_rows, contrast_rows, contrasts
from kvprobe.tasks.items import Item
from kvprobe.tasks.traces import TraceItem

if TYPE_CHECKING:
    import pandas as pd

SEMANTICS = "prefill-then-evict: the context is prefilled exactly, arms act on question and answer tokens"
TRACED = "never existed: an arm acts on every position after its keys, and all of that is computed again"
BALANCE = (
    *("match_on", "variable", "matched", "max_abs_ln_ratio", "smd_before", "before_low", "before_high"),
    *("smd_after", "after_low", "after_high", "n", "flagged"),
)


@dataclass(frozen=True)
class Result:
    """A finished run: the probed items, the summary, and its tables."""

    settings: Settings
    probes: tuple[Probed, ...]
    summary: dict[str, Any]
    traces: bool = False

    def items(self) -> pd.DataFrame:
        """One row an item: what it is, how its placebos were found, or how far the strongest candidates were."""
        import pandas as pd

        return pd.DataFrame([_item_row(probe) for probe in self.probes])

    def arms(self) -> pd.DataFrame:
        """One row an item × arm."""
        return arms_frame(self.probes)

    def balance(self) -> pd.DataFrame:
        """One row a matching × variable."""
        return balance_frame(self.arms(), self.settings)

    def contrasts(self) -> pd.DataFrame:
        """One row a matching × outcome."""
        import pandas as pd

        return pd.DataFrame(contrast_rows(self.summary))

    def mentions(self) -> pd.DataFrame | None:
        """One row an item × mention, of traces."""
        return mention_frame(self.probes) if self.traces else None

    def tables(self) -> dict[str, pd.DataFrame]:
        """All of them, by name."""
        found = {
            "items": self.items(),
            "arms": self.arms(),
            "balance": self.balance(),
            "contrasts": self.contrasts(),
        }
        mentions = self.mentions()
        return found if mentions is None else found | {"mentions": mentions}


def run(
    model: Any,
    items: Sequence[Item] | Sequence[TraceItem] | None = None,
    arms: Sequence[str] | None = None,
    *,
    settings: Settings | None = None,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    keep: parts.Keep = parts.afresh,
) -> Result:
    """Match, run and score all items: an ablation whose control got an equally strong blow.

    Parameters
    ----------
    model
        A loaded model.
    items
        Items of a task (:func:`kvprobe.tasks.make`, :func:`kvprobe.tasks.trace`) with labelled spans; None: those that
        the settings name.
    arms
        Which of ``gate``, ``placebo``, ``length_only``, ``injected``, ``dose`` to run beside ``clean``, ``identity``
        and ``target``; None: the settings' (all).
    settings
        Everything else; None: the defaults.
    progress
        Wraps the iteration over items.
    keep
        Stores what each item gives, for a run that goes on later (:class:`kvprobe.parts.Parts`); by default nothing.

    Returns
    -------
    Result
        ``summary`` (what ``kvprobe placebo --json`` prints), and the tables ``items()``, ``arms()``, ``balance()``,
        ``contrasts()``.

    Raises
    ------
    TaskError
        No items, items of two kinds, an unknown arm, layers that the model does not have.
    PromptError, TheoryError
        A target that no row sees, or no room for controls beside it.
    """
    begun = time.perf_counter()
    if not hasattr(model, "geometry"):
        raise TaskError(f"model={quote(model)} is not a loaded model: allowed is what kvprobe.load returns")
    if settings is not None and not isinstance(settings, Settings):
        raise TaskError(f"settings={quote(settings)}: allowed are kvprobe.placebo.Settings")
    settings = (settings or Settings()).running(arms)
    made = _checked(model, settings, items)
    traces = isinstance(made[0], TraceItem)
    probe: Callable[..., Probed] = probe_trace if traces else probe_item
    probes = tuple(
        keep(f"item {index}", partial(probe, model, settings, item, index))
        for index, item in progress(list(enumerate(made)))
    )
    probed = time.perf_counter()
    summary = summarise(probes, settings, traces) | _asked(settings, items)
    totals = {name: sum(probe.timings[name] for probe in probes) for name in probes[0].timings}
    summary["timings_s"] = totals | {"items_s": probed - begun, "summary_s": time.perf_counter() - probed}
    return Result(settings, probes, summary, traces)


def validate(model: Any, settings: Settings) -> None:
    """Refuse settings that do not fit the model before anything is computed or written."""
    for index, item in enumerate(_checked(model, settings, None)):
        if isinstance(item, TraceItem):
            trace_windows(settings, item, index)
        else:
            inputs.check_length(model, len(item.prompt) + max(len(item.answer_ids), decoded(settings, item)))
            item_windows(settings, item, index)


def _checked(model: Any, settings: Settings, items: Any) -> list[Any]:
    n_layers = model.geometry.n_layers
    outside = [layer for layer in settings.layers or () if not 0 <= layer < n_layers]
    if outside:
        raise TaskError(f"layers names {outside}, the model has layers 0 … {n_layers - 1}")
    if items is not None and (isinstance(items, (str, Item, TraceItem)) or not isinstance(items, Sequence)):
        raise TaskError(f"items={quote(items)}: allowed is a list of items")
    made: list[Any] = list(settings.make(model) if items is None else items)
    kinds = {type(item) for item in made}
    if len(kinds) != 1 or not kinds <= {Item, TraceItem}:
        shown = sorted(kind.__name__ for kind in kinds) or "none"
        raise TaskError(f"items are {shown}; allowed: at least one Item, or at least one TraceItem, not both")
    return made


def _asked(settings: Settings, items: Any) -> dict[str, Any]:
    """Task and length of what was run: the settings name neither of a file's lines nor of items that were handed in."""
    if items is None:
        return {"task": settings.task, "length": None if settings.path else settings.length}
    named, lengths = {item.task for item in items}, {getattr(item, "length", None) for item in items}
    return {"task": ", ".join(sorted(named)), "length": lengths.pop() if len(lengths) == 1 else None}


def summarise(probes: Sequence[Probed], settings: Settings, traces: bool = False) -> dict[str, Any]:
    """All numbers of a run as plain values (see the README for each key)."""
    arms = arms_frame(probes)
    outcome = "settling_depth" if traces else "logprob"
    clean = arms[arms["arm"] == "clean"]
    summary = {
        "task": settings.task,
        "length": settings.length,
        "n_items": len(probes),
        "seed": settings.seed,
        "placebos": settings.placebos,
        "outcome": outcome,
        "semantics": TRACED if traces else SEMANTICS,
        "n_answered": int(clean["answered"].sum()),
        "accuracy": None if traces else float(clean["score"].mean()),
        "identity_max_abs": max(probe.identity_max_abs for probe in probes),
        "contrasts": contrasts(probes, arms, balance_frame(arms, settings), settings, outcome),
    }
    if traces:
        summary |= memory_summary(mention_frame(probes), settings.seed)
    return summary | {"settings": asdict(settings)}


def arms_frame(probes: Sequence[Probed]) -> pd.DataFrame:
    """All rows of all items."""
    import pandas as pd

    return pd.DataFrame([row for probe in probes for row in probe.rows])


def balance_frame(arms: pd.DataFrame, settings: Settings) -> pd.DataFrame:
    """See :meth:`Result.balance`."""
    import pandas as pd

    return pd.DataFrame(balance_rows(arms, settings), columns=[*BALANCE])


def _item_row(probe: Probed) -> dict[str, Any]:
    row = {"item": probe.index} | {name: value for name, value in probe.facts.items() if name != "mention_rows"}
    for match_on in MATCH_ON:
        match = probe.matches[match_on]
        row[f"{match_on}_remedy"] = match.remedy or ""
        row[f"{match_on}_max_abs_ln_ratio"] = max((abs(ratio) for ratio in match.ln_ratios), default=np.nan)
        row |= {f"{match_on}_strongest_{name}": value for name, value in match.strongest.items()}
    return row | {"identity_max_abs": probe.identity_max_abs} | dict(probe.timings)

"""What the analyses of sinks share: needle items observed on question and answer rows, and means over them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from needle_items import Made, made, options

if TYPE_CHECKING:
    from kvprobe.sinks import Scores
    from kvprobe.tasks.items import Item

SEMANTICS = "clean runs: nothing is masked or evicted; means over question and teacher-forced answer rows"
CONTRASTS = ("first", "first4", "secondary_sink", "hard", "other")
"""What evidence tokens are held against: the first position, and buckets of :mod:`kvprobe.sinks`, with ``hard``
(needles that are never asked about) taken out of ``other``."""
TASK = "niah_single_2"


def needle_options(parser: argparse.ArgumentParser, items: int, task: str = TASK, length: int = 1500) -> None:
    """Which items are made, with this default task and length."""
    options(parser, items)
    parser.set_defaults(task=task, length=length)


def needles(model: Any, asked: dict[str, Any], items: int, length: int = 1500) -> Made:
    """Take the items' part out of ``asked`` and make them; items without evidence or answer are refused."""
    from kvprobe.heads.evidence import evidence

    asked["task"], asked["length"] = asked.get("task", TASK), asked.get("length", length)
    found = made(model, asked, items)
    for item in found.items:
        evidence(item)
    return found


def together(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is said of the items of several tasks at once; ``needles`` is a number where all tasks plant as many."""
    tokens = [size for about in every for size in about["tokens"].values()]
    named, planted = [about["task"] for about in every], [about["needles"] for about in every]
    needles = planted[0] if len(set(planted)) == 1 else "/".join(map(str, planted))
    found = {"tasks": named, "task": " and ".join(named), "needles": needles}
    return every[0] | found | {"tokens": {"min": min(tokens), "max": max(tokens)}}


def answer_rows(item: Item) -> list[int]:
    """The rows that predict the answer's tokens: the last of the prompt, and all but the last of the answer."""
    last = len(item.prompt) - 1
    return list(range(last, last + len(item.answer_ids)))


def observed(model: Any, item: Item) -> tuple[Any, Any]:
    """Prompt with its answer, and the trace of question and answer rows."""
    from kvprobe import runs
    from kvprobe.heads.evidence import rows

    whole = item.prompt.extended(item.answer_ids)
    return whole, runs.observe(model, whole, rows(item))


def sorted_keys(item: Item, n: int, secondary: Sequence[int] = ()) -> dict[str, list[int]]:
    """Class → its keys: ``evidence`` and :data:`CONTRASTS`, disjoint but for ``first``; question and answer in none."""
    from kvprobe import sinks

    asked: dict[str, Any] = {"evidence": item.spans["evidence"], "context_stop": item.context_stop}
    labelled = [key for key in secondary if key < item.context_stop]
    found = sinks.buckets(n, **asked, secondary=labelled, pad=item.prompt.pad).keys
    hard = {key for start, stop in item.spans.get("hard", []) for key in range(start, stop)} & {*found["other"]}
    parts = {name: list(found[name]) for name in ("evidence", "first4", "secondary_sink")}
    parts["first"] = parts["first4"][:1]
    return parts | {"hard": sorted(hard), "other": [key for key in found["other"] if key not in hard]}


def measures(scores: Scores) -> dict[str, Any]:
    """Measure → ``[1 + L, n]``: pooled over all heads, then over those of each layer.

    ``ratio`` ρ = Σ A m / Σ A, ``norm`` m, ``mass`` s, ``value_mass`` (s + ε) m; ``relative_…`` with m in units of its
    head's median.
    """
    import numpy as np

    def both(of: Callable[[str], Any]) -> Any:
        return np.vstack([of("all"), of("layer")])

    return {
        "relative_ratio": both(lambda pool: scores.ratio(pool, relative=True)),
        "ratio": both(lambda pool: scores.ratio(pool)),
        "relative_norm": both(lambda pool: scores.pooled("norm", pool, relative=True)),
        "norm": both(lambda pool: scores.pooled("norm", pool)),
        "mass": both(lambda pool: scores.pooled("mass", pool)),
        "value_mass": both(lambda pool: scores.pooled("value_mass", pool)),
    }


def averaged(values: Sequence[float | None], seed: int, kind: str = "mean") -> dict[str, Any]:
    """Mean over items with ``low``, ``high`` and ``n``; undefined values are left out and counted in ``excluded``.

    ``kind``: ``"mean"``, ``"auroc"`` (an interval that keeps its width where all items agree), ``"part"`` (in [0, 1])
    or ``"correlation"`` (in [−1, 1]).
    """
    from kvprobe.stats import auroc_interval, mean_interval

    kept = [float(value) for value in values if value is not None and value == value]
    bounds = {"part": (0.0, 1.0), "correlation": (-1.0, 1.0)}.get(kind)
    found = auroc_interval(kept, seed=seed) if kind == "auroc" else mean_interval(kept, seed=seed, bounds=bounds)
    return {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n, "excluded": len(values) - found.n}


def log_ratio(above: float | None, below: float | None) -> float:
    """log2 of a ratio; NaN where a side is nothing, because no row sees its keys."""
    import math

    return math.log2(above / below) if above and below else float("nan")


def spearman(x: Any, y: Any) -> float:
    """Rank correlation, ties at their mean rank; NaN where one side does not vary or is not finite."""
    import numpy as np
    from scipy.stats import rankdata

    a, b = (np.asarray(each, dtype=float).ravel() for each in (x, y))
    if a.size < 2 or not (np.isfinite(a) & np.isfinite(b)).all() or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def said(row: dict[str, Any], form: str = ".2f") -> str:
    """``mean [low, high]``."""
    from needle_items import ends

    if row["mean"] != row["mean"]:
        return "undefined"
    return f"{row['mean']:{form}} {ends(row['low'], row['high'], form)}"

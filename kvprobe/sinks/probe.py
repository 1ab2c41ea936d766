"""One input: scores of every key, the evidence masked, and what is read while the answer is generated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe import runs
from kvprobe.interventions import KVMask
from kvprobe.outcomes import Outcome
from kvprobe.sinks import pooling
from kvprobe.sinks.after import after
from kvprobe.sinks.buckets import Buckets, buckets
from kvprobe.sinks.courses import courses
from kvprobe.sinks.epsilon import epsilon_sweep
from kvprobe.sinks.rates import sink_rates
from kvprobe.sinks.recovery import recovery
from kvprobe.sinks.scores import Scores, scores
from kvprobe.sinks.secondary import secondary_sinks
from kvprobe.sinks.settings import Case, Settings
from kvprobe.tasks.scoring import string_match_all
from kvprobe.traces import Trace

if TYPE_CHECKING:
    import pandas as pd

MORE_TOKENS = 8
"""Tokens that may be generated beyond the gold answer's length."""


@dataclass(frozen=True)
class Probed:
    """Everything measured on one input; the scores themselves are gone.

    Attributes
    ----------
    facts
        Number, name, tokens, rows, and of an item whether it was answered.
    buckets
        One row a layer × head × bucket (:meth:`kvprobe.sinks.Scores.bucket_table`, with ``share``, ``output`` and
        ``relative_output`` of :func:`kvprobe.sinks.pooling.by_bucket`).
    pooled
        Bucket → its numbers over the layers that are left in.
    tokens
        One row a position, pooled over those layers.
    sinks
        One row a layer × head.
    positions, auroc, epsilon
        See :mod:`kvprobe.sinks.pooling` and :func:`kvprobe.sinks.epsilon_sweep`.
    secondary
        What was found, and how well scores recover it; None where it was not looked for.
    after, courses
        Tables; None where they were not made.
    """

    facts: dict[str, Any]
    buckets: pd.DataFrame
    pooled: dict[str, dict[str, float]]
    tokens: pd.DataFrame
    sinks: pd.DataFrame
    positions: list[dict[str, Any]]
    auroc: dict[str, dict[str, float]]
    epsilon: list[dict[str, Any]]
    secondary: dict[str, Any] | None = None
    secondary_table: pd.DataFrame | None = None
    after: pd.DataFrame | None = None
    courses: pd.DataFrame | None = None
    timings: dict[str, float] = field(default_factory=dict)


def probe_case(model: Any, settings: Settings, case: Case) -> Probed:
    """Observe one input and everything that is derived from it; the context is prefilled once for all of it."""
    clock = _Clock()
    trace = runs.observe(model, case.whole, case.rows(settings.rows))
    clock("observe_s")
    found = scores(trace, settings.epsilon, settings.p)
    clock("scores_s")
    labelled = _secondary(model, settings, case, trace, found)
    clock("secondary_s")
    sorted_ = buckets(
        trace.n,
        evidence=case.evidence,
        secondary=() if labelled is None else labelled[0],
        context_stop=case.context_stop if case.context_stop < trace.n else None,
        pad=trace.pad,
    )
    measured = _measured(model, settings, case, found, sorted_)
    clock("buckets_s")
    facts, more = _arms(model, settings, case, trace, sorted_)
    clock("arms_s")
    about = {"index": case.index, "name": case.name, "tokens": len(case.prompt), "context_stop": case.context_stop}
    about |= {"n_rows": len(found.queries), "truncated": case.truncated, "n_evidence": len(sorted_.keys["evidence"])}
    hidden: dict[str, Any] = {} if labelled is None else {"secondary": labelled[1], "secondary_table": labelled[2]}
    return Probed(facts=about | facts, **measured, **hidden, **more, timings=clock.laps)


class _Clock:
    """Seconds of each step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def kept_layers(n_layers: int, settings: Settings) -> list[int]:
    """Layers that the rule stated before the run leaves in."""
    return [layer for layer in range(n_layers) if layer not in settings.exclude_layers]


def _measured(model: Any, settings: Settings, case: Case, found: Scores, sorted_: Buckets) -> dict[str, Any]:
    layers = kept_layers(found.shape[0], settings)
    kept = pooling.of_layers(found, layers)
    measured = pooling.measures(kept)
    table = found.bucket_table(sorted_).merge(pooling.by_bucket(found, sorted_), on=["layer", "head", "bucket"])
    return {
        "buckets": table,
        "pooled": pooling.pooled_buckets(table[table["layer"].isin(layers)]),
        "tokens": _tokens(kept, sorted_, measured, case.whole.tokens(model)),
        "sinks": sink_rates(found, settings.threshold),
        "positions": pooling.first_positions(sorted_, measured),
        "auroc": pooling.evidence_above_first4(kept, sorted_, measured),
        "epsilon": epsilon_sweep(kept, sorted_, settings.epsilons),
    }


def _tokens(kept: Scores, sorted_: Buckets, measured: dict[str, Any], texts: Sequence[str]) -> pd.DataFrame:
    """One row a position: its bucket and every pooled measure, with the value mass at ε = 0 (``value``) beside."""
    import pandas as pd

    columns = {"position": range(len(texts)), "text": texts, "bucket": sorted_.names(), "n_rows": kept.seen.max(0)}
    return pd.DataFrame(columns | measured | {"value": kept.pooled("value_mass", epsilon=0.0)})


def _secondary(
    model: Any, settings: Settings, case: Case, trace: Trace, found: Scores
) -> tuple[list[int], dict[str, Any], pd.DataFrame] | None:
    """Positions labelled in some layer that is left in, what recovers the label, and the table."""
    if not settings.secondary:
        return None
    secondary = secondary_sinks(model, case.whole, trace, found)
    kept = kept_layers(trace.n_layers, settings)
    positions = np.flatnonzero(secondary.label[kept].any(0)).tolist()
    texts, table = case.whole.tokens(model), secondary.table()
    table.insert(2, "text", [texts[key] for key in table["position"]])
    about = {"counts": secondary.counts() | {"tokens": len(positions)}, "recovery": recovery(secondary, found, kept)}
    return positions, about | {"texts": [texts[key] for key in positions], "options": asdict(secondary.options)}, table


def _arms(
    model: Any, settings: Settings, case: Case, trace: Trace, sorted_: Buckets
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer as it is generated, with and without the evidence; nothing for a document."""
    if case.item is None or not (settings.with_after or settings.with_courses):
        return {}, {}
    masks = [KVMask(keys=[], name="clean")]
    masks += [KVMask(keys=case.evidence, queries="suffix", name="evidence")] if settings.with_after else []
    outcomes = runs.intervene(
        model,
        case.prompt,
        masks,
        suffix=len(case.prompt) - case.context_stop,
        continuation=list(case.answer_ids),
        generate=len(case.answer_ids) + MORE_TOKENS,
        prefix=trace.prefix(case.context_stop - case.prompt.pad),
        logits="continuation",
    )
    tables: dict[str, pd.DataFrame] = {}
    if settings.with_after:
        tables["after"] = _after(outcomes[1], outcomes[0], sorted_, settings)
    clean = outcomes[0].generated
    if settings.with_courses and clean:
        prefix = trace.prefix(len(case.prompt) - case.prompt.pad)
        tables["courses"] = courses(model, case.prompt, _spans(case, sorted_), clean, prefix=prefix, p=settings.p)
    return _answers(model, case, outcomes), tables


def _spans(case: Case, sorted_: Buckets) -> dict[str, list[tuple[int, int]]]:
    """Buckets of time courses: evidence, secondary sinks, other labelled sentences, and the question."""
    sinks = [(key, key + 1) for key in sorted_.keys["secondary_sink"] if key < len(case.prompt)]
    others = {label: list(found) for label, found in case.spans.items() if label != "evidence"}
    question = [(case.context_stop, len(case.prompt))]
    return {"evidence": case.evidence, "secondary_sink": sinks, **others, "question": question}


def _answers(model: Any, case: Case, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    assert case.item is not None
    facts: dict[str, Any] = {"seed": case.item.seed, "gold": case.item.answer}
    for name, outcome in zip(("clean", "masked"), outcomes, strict=False):
        text = model.tokenizer.decode(outcome.generated, skip_special_tokens=True)
        score = float(string_match_all(text, case.item.references))
        facts |= {f"answer_{name}": text, f"score_{name}": score}
    return facts


def _after(masked: Outcome, clean: Outcome, sorted_: Buckets, settings: Settings) -> pd.DataFrame:
    """One row a reading × layer × head × bucket: shares and outputs before and after."""
    import pandas as pd

    keys = ["layer", "head", "bucket"]
    parts = []
    for reading, pair in after(masked, clean, epsilon=settings.epsilon, p=settings.p).items():
        before, behind = (pooling.by_bucket(each, sorted_) for each in pair)
        both = before.merge(behind, on=keys, suffixes=("_before", "_after"))
        both.insert(0, "reading", reading)
        parts.append(both)
    return pd.concat(parts, ignore_index=True)

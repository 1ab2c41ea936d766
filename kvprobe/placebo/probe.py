"""One item: matched before any outcome is seen, then all arms over one shared prefix, and what each did."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvprobe import runs
from kvprobe.errors import InterventionError
from kvprobe.outcomes import Outcome, answer_logprobs, answer_match, argmax_flips, deep_from, kl_divergence, settle
from kvprobe.placebo.arms import Arm, Design
from kvprobe.placebo.finder import Match
from kvprobe.placebo.keysets import KeySet, Span, centre, size, text
from kvprobe.placebo.matching import match_each
from kvprobe.placebo.pools import length_only
from kvprobe.placebo.scope import Scope
from kvprobe.placebo.settings import MATCH_ON, Settings
from kvprobe.tasks.items import Item
from kvprobe.tasks.scoring import string_match_all

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]


@dataclass(frozen=True)
class Probed:
    """Everything measured on one item.

    Attributes
    ----------
    facts
        What the item is, for the table of items.
    matches
        ``match_on`` → its placebos, or how far the strongest candidates were.
    rows
        One an arm, for the table of arms.
    identity_max_abs
        Largest difference between the logits of the arm that masks nothing and the clean arm's: 0.
    """

    index: int
    facts: Row
    matches: Mapping[str, Match]
    rows: Sequence[Row]
    identity_max_abs: float
    timings: Mapping[str, float]


def probe_item(model: Any, settings: Settings, item: Item, index: int) -> Probed:
    """Observe, match, run and score one item with a question and an answer."""
    begun = time.perf_counter()
    trace = runs.observe(model, item.prompt.extended(item.answer_ids), _rows(item))
    observed = time.perf_counter()
    design = item_design(model, trace, settings, item, index)
    full = design.full()
    graded = design.graded()
    designed = time.perf_counter()
    outcomes = _run(model, item, trace, full, settings)
    doses = _run(model, item, trace, graded, settings, graded=True) if graded else []
    ran = time.perf_counter()
    scored = [_scored(model, settings, item, arm, out, outcomes[0]) for arm, out in zip(full, outcomes, strict=True)]
    scored += [_effect(item, out, outcomes[0]) | _settled(None) for out in doses]
    answered = bool(scored[0]["score"] == 1.0)
    stop = item.context_stop
    rows = [
        described(index, arm, stop) | more | {"answered": answered} | receipt(out)
        for arm, more, out in zip([*full, *graded], scored, [*outcomes, *doses], strict=True)
    ]
    difference_to_clean(rows)
    done = time.perf_counter()
    timings = {
        "observe_s": observed - begun,
        "match_s": designed - observed,
        "arms_s": ran - designed,
        "outcomes_s": done - ran,
    }
    facts = {
        "seed": item.seed,
        "task": item.task,
        "tokens": len(item.prompt),
        "context_stop": stop,
        "answer": scored[0]["text"],
        "gold": item.answer,
        "score": scored[0]["score"],
        "answered": answered,
        "target": text(design.target),
        "hard": len(item.spans.get("hard", [])),
    }
    identity = float((outcomes[1].logits - outcomes[0].logits).abs().max())
    return Probed(index, facts, design.matches, rows, identity, timings)


def item_design(model: Any, trace: Any, settings: Settings, item: Item, index: int) -> Design:
    """Match an item's target on its clean trace; nothing of any outcome is known yet."""
    target, hard, protect = _spans(item)
    weights = residual_weights(model, item, trace) if settings.residual_norm else None
    windows = item_windows(settings, item, index)
    matches, table = matched(
        trace,
        settings,
        target,
        windows,
        hard,
        protect,
        item.context_stop,
        weights,
        boundaries=item.spans.get("distractor"),
    )
    seed = seed_of(settings, index)
    return Design(trace, target, matches, windows, settings, "suffix", table, seed, layer_weights=weights)


def item_windows(settings: Settings, item: Item, index: int) -> tuple[KeySet, ...]:
    """The length-only windows of an item, which need no run."""
    target, hard, protect = _spans(item)
    return length_only(
        len(item.prompt) + len(item.answer_ids),
        target,
        settings.placebos,
        protect=protect,
        hard=hard,
        seed=seed_of(settings, index),
        first=first(item.prompt),
        stop=item.context_stop,
    )


def seed_of(settings: Settings, index: int) -> int:
    """Of an item's own draws."""
    return settings.seed * 10_000 + index


def _spans(item: Item) -> tuple[KeySet, list[Span], list[Span]]:
    """Target, hard spans, and what no placebo may touch."""
    spans = item.prompt.spans
    protect = [*item.spans.get("protect", []), *item.spans.get("decoy", [])]
    # What comes before the context is the instruction.
    if "context" in spans and spans["context"][0] > item.prompt.pad:
        protect.append((item.prompt.pad, spans["context"][0]))
    return tuple(sorted(item.spans["evidence"])), sorted(item.spans.get("hard", [])), protect


def decoded(settings: Settings, item: Item) -> int:
    """How many tokens an arm decodes."""
    return len(item.answer_ids) + 8 if settings.new_tokens is None else settings.new_tokens


def matched(
    trace: Any,
    settings: Settings,
    target: KeySet,
    windows: Sequence[KeySet],
    hard: Sequence[Span],
    protect: Sequence[Span],
    stop: int,
    weights: Any = None,
    *,
    after: bool = False,
    boundaries: Any = None,
) -> tuple[dict[str, Match], pd.DataFrame]:
    """Placebos at equal θ and at equal exact perturbation, and the strengths of the target and of ``windows``."""
    return match_each(
        Scope(trace, settings.layers, None, settings.p, after, weights),
        target,
        settings.placebos,
        MATCH_ON,
        settings.remedies,
        windows,
        caliper=settings.caliper,
        hard=hard,
        protect=protect,
        seed=settings.seed,
        position_caliper=settings.position_caliper,
        profile_weight=settings.profile_weight,
        first=trace.pad + 4,
        stop=stop,
        boundaries=boundaries,
    )


def first(prompt: Any) -> int:
    """First position that a placebo may hold: the four leading ones are nobody's placebo."""
    return int(prompt.pad) + 4


def residual_weights(model: Any, item: Item, trace: Any) -> list[float]:
    """1 / mean norm of the hidden state after each layer, over the rows that are touched."""
    out = runs.intervene(
        model,
        item.prompt,
        [()],
        suffix=len(item.prompt) - item.context_stop,
        continuation=list(item.answer_ids),
        prefix=trace.prefix(item.context_stop - item.prompt.pad),
        logits="continuation",
        keep_trace=False,
        streams=len(trace.queries),
    )[0]
    return (1 / out.streams.resid_post.float().norm(dim=-1).mean(-1)).tolist()


def described(index: int, arm: Arm, stop: int) -> Row:
    """What an arm is, for its row."""
    row = {
        "item": index,
        "arm": arm.arm,
        "match_on": arm.match_on,
        "remedy": arm.remedy,
        "number": arm.number,
        "spans": text(arm.keys),
        "length": size(arm.keys) if arm.keys else 0,
        "kappa": arm.kappa,
        "beta": arm.beta,
        "position": centre(arm.keys) / stop if arm.keys else math.nan,
        "ln_ratio": arm.ln_ratio,
        "tested": arm.tested,
    }
    names = ("bound", "perturbation", "centred", "value_mass", "mass")
    return row | {name: arm.strengths.get(name, math.nan) for name in names}


def receipt(out: Outcome) -> Row:
    """An outcome's receipt as columns."""
    return {f"receipt_{name}": value for name, value in out.receipt.to_dict().items()}


def difference_to_clean(rows: Sequence[Row]) -> None:
    """Add differences from the clean arm, the first row."""
    for row in rows:
        row["delta_logprob"] = row["logprob"] - rows[0]["logprob"]
        row["delta_settling"] = row["settling_depth"] - rows[0]["settling_depth"]


def _rows(item: Item) -> list[int]:
    """The query rows that a mask touches: question and teacher-forced answer."""
    return list(range(item.context_stop, len(item.prompt) + len(item.answer_ids)))


def _run(
    model: Any, item: Item, trace: Any, arms: Sequence[Arm], settings: Settings, graded: bool = False
) -> list[Outcome]:
    """All arms of an item over its context's prefix; doses are neither decoded nor looked into."""
    answer = list(item.answer_ids)
    found: list[Outcome] = runs.intervene(
        model,
        item.prompt,
        [arm.parts for arm in arms],
        suffix=len(item.prompt) - item.context_stop,
        continuation=answer,
        generate=0 if graded else decoded(settings, item),
        prefix=trace.prefix(item.context_stop - item.prompt.pad),
        logits="continuation",
        keep_trace=False,
        streams=0 if graded else len(answer) + 1,
    )
    return found


def _scored(model: Any, settings: Settings, item: Item, arm: Arm, out: Outcome, clean: Outcome) -> Row:
    """Every outcome of one arm."""
    written = model.tokenizer.decode(out.generated, skip_special_tokens=True)
    settling = settle(model, out, slice(0, len(item.answer_ids)), settings.threshold, settings.rule)
    deep = deep_from(model.geometry.n_layers, settings.rho)
    return (
        _effect(item, out, clean)
        | {"score": float(string_match_all(written, item.references)), "text": written}
        | _settled(settling.depth, deep)
    )


def _effect(item: Item, out: Outcome, clean: Outcome) -> Row:
    """Of the teacher-forced answer; the last row of logits lies behind it and predicts nothing of it."""
    ids, logits = list(item.answer_ids), out.logits[:-1]
    logprobs = answer_logprobs(logits, ids)
    return {
        "logprob": float(logprobs.sum()),
        "logprob_per_token": float(logprobs.mean()),
        "kl": float(kl_divergence(clean.logits[:-1], logits).sum()),
        "flips": int(argmax_flips(clean.logits[:-1], logits).sum()),
        "match": bool(answer_match(logits, ids).all()),
        "score": math.nan,
        "text": "",
    }


def _settled(depth: torch.Tensor | None, deep: int = 0) -> Row:
    if depth is None:
        return {"settling_depth": math.nan, "deep": math.nan}
    if not len(depth):
        raise InterventionError(
            "an item without an answer has no settling depth; allowed: answers of one token or more"
        )
    return {"settling_depth": float(depth.double().mean()), "deep": float((depth >= deep).double().mean())}

"""One item: its answer from the full cache, and from every compressed one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvprobe import eviction, runs
from kvprobe.curves.settings import Settings
from kvprobe.curves.sizes import compressed, written
from kvprobe.engine import Prefix
from kvprobe.eviction import Choice, KeepMask, LiveCache, Policy, entries
from kvprobe.interventions import KVMask
from kvprobe.outcomes import Outcome, answer_logprobs
from kvprobe.runs import prefill
from kvprobe.tasks.items import Item
from kvprobe.tasks.scoring import string_match_all

FULL = "full"
NOTHING = KVMask(keys=[], name=FULL)

Pair = tuple[Policy, str, Choice]
Read = tuple[list[Pair], list[Outcome], dict[str, float]]


@dataclass(frozen=True)
class Answer:
    """What one item's answer was from one cache.

    Attributes
    ----------
    policy, cache
        Which policy at which share (as given); ``"full"`` and ``"1"`` for the whole cache.
    kept
        Share of the entries that was kept, over all layers and heads: budgets are floors, and some methods' totals are
        not the share asked for.
    score
        Fraction of the references that the text contains.
    logprob
        ln p of the gold answer under teacher forcing, in nats.
    smallest_retained
        Smallest R of any row: how much of its own attention the worst-hit row kept.
    """

    item: int
    policy: str
    cache: str
    kept: float
    score: float
    logprob: float
    text: str
    smallest_retained: float
    notes: dict[str, Any]


@dataclass(frozen=True)
class Answers:
    """All answers of one item; the first is the full cache's."""

    item: Item
    answers: tuple[Answer, ...]
    timings: dict[str, float]


def answer_item(model: Any, settings: Settings, index: int) -> Answers:
    """Answer one item from every cache; the context is prefilled once where the semantics allows it."""
    item = settings.item(model, index)
    ids = item.prompt.ids[item.prompt.pad : item.prompt.pad + compressed(settings, item)]
    read = _prefilled if settings.chunk is None else _chunked
    pairs, outcomes, timings = read(model, settings, item, ids)
    labels = [(FULL, "1", None), *((policy.name, cache, choice) for policy, cache, choice in pairs)]
    answers = tuple(
        _answer(model, index, item, label, outcome) for label, outcome in zip(labels, outcomes, strict=True)
    )
    return Answers(item, answers, timings)


def _prefilled(model: Any, settings: Settings, item: Item, ids: Tensor) -> Read:
    """One exact prefill; every policy chooses from what its scorer saw of it, and all arms share it."""
    begun = time.perf_counter()
    measured = eviction.measure(model, ids, settings.policies, future=_future(settings, item))
    seen = time.perf_counter()
    pairs = [
        (policy, cache, policy.choose(measured.scored(policy), cache))
        for policy in settings.policies
        for cache in settings.caches
    ]
    chosen = time.perf_counter()
    arms = [NOTHING, *(KeepMask(choice.keep) for _, _, choice in pairs)]
    outcomes = _ask(model, settings, item, arms, measured.prefix)
    timings = {"prefill_and_scores_s": seen - begun, "selection_s": chosen - seen}
    return pairs, outcomes, timings | {"answers_s": time.perf_counter() - chosen}


def _future(settings: Settings, item: Item) -> Sequence[int]:
    """What comes after the compressed part, gold answer included: for the oracle's eyes only."""
    if not any(policy.scorer.needs_future for policy in settings.policies):
        return []
    return [*item.prompt.ids[item.prompt.pad + compressed(settings, item) :].tolist(), *item.answer_ids]


def _chunked(model: Any, settings: Settings, item: Item, ids: Tensor) -> Read:
    """Every policy and size reads the context for itself, because what it evicts changes what it reads."""
    begun = time.perf_counter()
    pairs: list[Pair] = []
    outcomes = _ask(model, settings, item, [NOTHING], prefill(model, item.prompt, len(ids)))
    reading = 0.0
    for policy in settings.policies:
        for cache in settings.caches:
            opened = time.perf_counter()
            live, before = _evicting(model, settings, policy, cache, ids)
            reading += time.perf_counter() - opened
            pairs.append((policy, cache, Choice(live.keep.clone(), live.keep.sum(-1), live.notes)))
            outcomes += _ask(model, settings, item, [(*before, KeepMask(live.keep.clone()))], live.prefix())
    timings = {"prefill_and_scores_s": reading, "selection_s": 0.0}  # a live cache selects while it reads
    return pairs, outcomes, timings | {"answers_s": time.perf_counter() - begun - reading}


def _evicting(
    model: Any, settings: Settings, policy: Policy, cache: str, ids: Tensor
) -> tuple[LiveCache, tuple[KeepMask, ...]]:
    """:func:`kvprobe.eviction.chunked_prefill`, and what the last chunk had lost when it ran.

    With ``setting="joint"`` the last prompt token belongs to that chunk: it answers from what was there before the last
    eviction, and is run once more to be read.
    """
    assert settings.chunk is not None
    ids, live = ids.to(model.device), LiveCache(model, policy)
    before = live.keep
    for start in range(0, len(ids), settings.chunk):
        before = live.keep
        live.feed(ids[start : start + settings.chunk], rows=1)
        live.evict(entries(live.length, cache))
    first = settings.setting == "context" or not before.shape[-1]
    return live, () if first else (KeepMask(before, "suffix"),)


def _ask(model: Any, settings: Settings, item: Item, arms: Sequence[Any], prefix: Prefix) -> list[Outcome]:
    """Force the gold answer and write a free one, from every arm's cache."""
    answer = list(item.answer_ids)
    outcomes: list[Outcome] = runs.intervene(
        model,
        item.prompt,
        list(arms),
        suffix=max(1, len(item.prompt) - item.context_stop) if settings.setting == "context" else 1,
        continuation=answer,
        generate=written(settings, len(answer)),
        prefix=prefix,
        logits="continuation",
        keep_trace=False,
    )
    return outcomes


def _answer(model: Any, index: int, item: Item, label: tuple[str, str, Choice | None], outcome: Outcome) -> Answer:
    policy, cache, choice = label
    text = model.tokenizer.decode(outcome.generated, skip_special_tokens=True)
    return Answer(
        index,
        policy,
        cache,
        1.0 if choice is None else choice.share,
        float(string_match_all(text, item.references)),
        float(answer_logprobs(outcome.logits[:-1], list(item.answer_ids)).sum()),
        text,
        outcome.receipt.smallest_retained,
        {} if choice is None else choice.notes,
    )

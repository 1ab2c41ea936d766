"""One item: what every head attends to while answering, and the answer with each span cut out of the cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprobe import runs
from kvprobe.interventions import KVMask
from kvprobe.needles.settings import FEATURES, Settings
from kvprobe.outcomes import Outcome, answer_logprobs, kl_divergence
from kvprobe.spans import span_stats
from kvprobe.tasks.items import LABELS, Item
from kvprobe.tasks.scoring import string_match_all

FIRST = 4
"""Size of the bucket ``first4``: the leading positions, BOS included."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """One counterfactual of an item and what it did to the answer (differences from the clean arm, in nats)."""

    label: str
    spans: tuple[tuple[int, int], ...]
    logprob: float
    delta_logprob: float
    kl: float
    score: float
    text: str
    receipt: dict[str, Any]


@dataclass(frozen=True)
class ItemProbe:
    """Everything measured on one item.

    Attributes
    ----------
    labels, spans
        Label and tokens of each of the S spans.
    where
        Names of the Q observation points: ``context_end``, ``last``, ``answer_0``, …
    features
        name → [L, H, Q, S].
    shift
        bucket → reading → mean change of attention when the evidence is masked.
    """

    index: int
    item: Item
    labels: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    where: tuple[str, ...]
    queries: tuple[int, ...]
    features: dict[str, Array]
    arms: tuple[Arm, ...]
    shift: dict[str, dict[str, float]]
    timings: dict[str, float]

    @property
    def clean(self) -> Arm:
        """The arm that masks nothing."""
        return self.arms[0]

    def is_label(self, *labels: str) -> NDArray[np.bool_]:
        """Boolean [S]."""
        return np.isin(self.labels, labels)


def probe_item(model: Any, settings: Settings, index: int) -> ItemProbe:
    """Observe one item and run all its arms; the context is prefilled once for everything."""
    item = settings.item(model, index)
    labels = tuple(label for label in LABELS for _ in item.spans.get(label, []))
    spans = tuple(span for label in LABELS for span in item.spans.get(label, []))
    begun = time.perf_counter()
    trace, where, queries = _observe(model, item)
    observed = time.perf_counter()
    features = _features(trace, spans, queries, settings.p)
    measured = time.perf_counter()
    arms, shift = _arms(model, item, trace, settings)
    done = time.perf_counter()
    timings = {"observe_s": observed - begun, "spans_s": measured - observed, "arms_s": done - measured}
    return ItemProbe(index, item, labels, spans, where, queries, features, arms, shift, timings)


def _observe(model: Any, item: Item) -> tuple[Any, tuple[str, ...], tuple[int, ...]]:
    """Teacher-force the gold answer; keep the rows of the last context token, last prompt token and answer tokens."""
    n = len(item.prompt)
    queries = (item.context_stop - 1, n - 1, *range(n, n + len(item.answer_ids)))
    where = ("context_end", "last", *(f"answer_{k}" for k in range(len(item.answer_ids))))
    return runs.observe(model, item.prompt.extended(item.answer_ids), list(queries)), where, queries


def _features(trace: Any, spans: Sequence[tuple[int, int]], queries: Sequence[int], p: int) -> dict[str, Array]:
    frame = span_stats(trace, spans, p=p)
    shape = (trace.n_layers, trace.n_heads, len(queries), len(spans))
    features = {name: frame[name].to_numpy(np.float64).reshape(shape) for name in FEATURES if name != "delta_mass"}
    features["delta_mass"] = features["mass"] - features["mass"][:, :, :1]
    return {name: features[name] for name in FEATURES}


def _plan(item: Item) -> tuple[list[str], list[tuple[tuple[int, int], ...]]]:
    """Arms: clean first, all evidence together, then every hard needle, decoy and distractor alone."""
    labels, groups = ["clean", "evidence"], [(), tuple(item.spans["evidence"])]
    for label in ("hard", "decoy", "distractor"):
        for span in item.spans.get(label, []):
            labels.append(label)
            groups.append((span,))
    return labels, groups


def _arms(
    model: Any, item: Item, trace: Any, settings: Settings
) -> tuple[tuple[Arm, ...], dict[str, dict[str, float]]]:
    labels, groups = _plan(item)
    masks = [
        KVMask(keys=list(spans), queries="suffix", name=label) for label, spans in zip(labels, groups, strict=True)
    ]
    answer = list(item.answer_ids)
    outcomes = runs.intervene(
        model,
        item.prompt,
        masks,
        suffix=len(item.prompt) - item.context_stop,
        continuation=answer,
        generate=len(answer) + 8 if settings.new_tokens is None else settings.new_tokens,
        prefix=trace.prefix(item.context_stop - item.prompt.pad),
        logits="continuation",
    )
    clean = outcomes[0]
    arms = tuple(
        _arm(model, item, label, spans, outcome, clean)
        for label, spans, outcome in zip(labels, groups, outcomes, strict=True)
    )
    return arms, attention_shift(outcomes[1], clean, item, len(answer) + 1)


def _arm(
    model: Any, item: Item, label: str, spans: tuple[tuple[int, int], ...], outcome: Outcome, clean: Outcome
) -> Arm:
    """Score one arm; the last row of logits lies behind the answer and predicts nothing of it."""
    ids = list(item.answer_ids)
    mine, theirs = (float(answer_logprobs(each.logits[:-1], ids).sum()) for each in (outcome, clean))
    kl = float(kl_divergence(clean.logits[:-1], outcome.logits[:-1]).sum())
    text = model.tokenizer.decode(outcome.generated, skip_special_tokens=True)
    score = float(string_match_all(text, item.references))
    return Arm(label, spans, mine, mine - theirs, kl, score, text, outcome.receipt.to_dict())


def attention_shift(masked: Outcome, clean: Outcome, item: Item, rows: int) -> dict[str, dict[str, float]]:
    """Mean change of attention mass per bucket over layers, heads and the last ``rows`` rows, read three ways.

    ``raw`` A′ − A_clean; ``corrected`` A′R − A_clean; ``conditional`` A′ − N⊙A_clean/R_clean (change of shares among
    survivors). Buckets: ``first4`` and ``content`` (the rest of the context without the evidence).
    """
    assert masked.trace is not None
    buckets = {name: torch.tensor(keys) for name, keys in _buckets(item).items()}
    totals = {name: dict.fromkeys(("raw", "corrected", "conditional"), 0.0) for name in buckets}
    n_layers = masked.trace.n_layers
    for layer in range(n_layers):
        before = clean.own_attention(layer)
        readings = {
            "raw": masked.attention(layer) - before,
            "corrected": masked.corrected_attention(layer) - before,
            "conditional": masked.attention_change(layer, clean)[1].shares,
        }
        for name, keys in buckets.items():
            for reading, change in readings.items():
                totals[name][reading] += _mean_mass(change, keys, rows) / n_layers
    return totals


def _mean_mass(change: Tensor, keys: Tensor, rows: int) -> float:
    return float(change[:, -rows:][..., keys].sum(-1).mean())


def _buckets(item: Item) -> dict[str, list[int]]:
    first = list(range(item.prompt.pad, item.prompt.pad + FIRST))
    taken = set(first) | {key for start, stop in item.spans["evidence"] for key in range(start, stop)}
    content = [key for key in range(item.prompt.pad + FIRST, item.context_stop) if key not in taken]
    return {"first4": first, "content": content}

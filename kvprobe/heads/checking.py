"""causal(): is it the top heads that carry the evidence? Masked there alone, and in other heads of the same layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvprobe import parts, stats
from kvprobe.errors import InterventionError, TaskError, quote
from kvprobe.heads.evidence import Head, by_layer, context, evidence, forced, masked
from kvprobe.heads.scanning import top as top_scored
from kvprobe.heads.trials import greedy
from kvprobe.inputs import count
from kvprobe.outcomes import answer_logprobs, argmax_flips, kl_divergence
from kvprobe.tasks.items import Item
from kvprobe.tasks.scoring import string_match_all

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Row = dict[str, Any]
MORE_TOKENS = 8
"""Tokens that may be written beyond the gold answer's length."""


@dataclass(frozen=True, eq=False)
class Causal:
    """What masking the evidence in chosen heads did.

    Attributes
    ----------
    rows : DataFrame
        One row an item and arm: ``item, seed, arm`` (``top`` or ``random``), ``draw, heads`` (``layer:head …``),
        ``n_heads, delta_logprob`` (of the gold answer, masked − clean, nats), ``kl`` (nats, over the rows that predict
        the answer), ``answered`` (the clean run, decoding freely, writes the value), ``unchanged`` (with the gold
        answer forced, the first choice of every row is the clean run's).
    top : tuple of (layer, head)
        The heads that were chosen.
    summary : dict
        Plain values: ``top_k``, ``random_k`` (mean Δ log-prob over answered items), ``difference`` with ``ci_low,
        ci_high, ci_method``, ``p_signflip, p_attainable, cannot_reject, n`` and counts; ``why`` where there is no test.
    """

    rows: pd.DataFrame
    top: tuple[Head, ...]
    summary: dict[str, Any]


def causal(
    model: Any,
    scores: Any,
    items: Sequence[Item],
    *,
    k: int = 10,
    draws: int = 8,
    seed: int = 0,
    keep: parts.Keep = parts.afresh,
) -> Causal:
    """Mask the evidence in the k heads of the largest scores alone, and in k random others of the same layers.

    Parameters
    ----------
    scores : array [L, H]
        One number a head. They should come from other items than these: else the check is circular.
    items : sequence of Item
        With evidence and an answer. The mask is seen by question and answer rows.
    k, draws
        Size of the top set, and random sets an item. A random set has as many heads of each layer as the top set has
        there, drawn from the layer's others; every item has draws of its own. Where a layer has too few others all of
        them are taken: ``short`` counts the heads that a random set then lacks.

    keep
        Stores what each item gives (see :class:`kvprobe.parts.Parts`).

    Returns
    -------
    Causal
        The items that the clean run answers are tested: the sign flip of top − mean(random), paired by item.

    Raises
    ------
    InterventionError
        Scores that are not one finite number a head of the model; k or draws out of range; a top set that leaves no
        other head in its layers.
    TaskError
        No items, or one without evidence or answer.
    """
    import pandas as pd

    chosen, others = _chosen(model, scores, k)
    draws, seed = count("draws", draws, 1), count("seed", seed, 0)
    if isinstance(items, Item) or not items:
        raise TaskError(f"items={quote(items)}: allowed is a list of at least one item to check heads on")
    for item in items:
        evidence(item)
    sets = chosen, others
    rows = [
        row
        for number, item in enumerate(items)
        for row in keep(f"item {number}", partial(_drawn_item, model, item, number, sets, draws, [seed, number]))
    ]
    frame = pd.DataFrame(rows)
    about = _about(chosen, others, np.asarray(scores, float), draws, len(items))
    return Causal(frame, chosen, about | _tested(frame, seed))


def _chosen(model: Any, scores: Any, k: int) -> tuple[tuple[Head, ...], dict[int, list[int]]]:
    """The top heads, and the other heads of each of their layers."""
    shape = (model.geometry.n_layers, model.geometry.n_heads)
    try:
        table = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError):
        raise InterventionError(f"scores={quote(scores)}: allowed is one number a head, {list(shape)}") from None
    if table.shape != shape or not np.isfinite(table).all():
        bad = f"shape {list(table.shape)}" if table.shape != shape else "numbers that are not finite"
        raise InterventionError(f"scores have {bad}: allowed is one finite number a head, {list(shape)}")
    chosen = tuple((layer, head) for layer, head, _ in top_scored(table, count("k", k, 1, table.size - 1)))
    mine = by_layer(chosen)
    others = {layer: [head for head in range(shape[1]) if head not in heads] for layer, heads in mine.items()}
    if not any(others.values()):
        raise InterventionError(f"k={k}: the top heads are all heads of layers {[*mine]}, none is left to compare with")
    return chosen, others


def _drawn(chosen: Sequence[Head], others: dict[int, list[int]], draws: int, seed: list[int]) -> list[list[Head]]:
    """Random sets of other heads, as many in each layer as are chosen there (or all, where there are fewer)."""
    generator = np.random.default_rng(seed)
    wanted = {layer: min(len(heads), len(others[layer])) for layer, heads in by_layer(chosen).items()}
    return [
        [
            (layer, int(head))
            for layer, size in wanted.items()
            for head in sorted(generator.choice(others[layer], size, replace=False))
        ]
        for _ in range(draws)
    ]


def _drawn_item(
    model: Any, item: Item, number: int, sets: tuple[Any, dict[int, list[int]]], draws: int, seed: list[int]
) -> list[Row]:
    """All arms of one item with random sets of its own, which follow from its number."""
    chosen, others = sets
    return _item(model, item, number, chosen, _drawn(chosen, others, draws, seed))


def _item(model: Any, item: Item, number: int, chosen: Sequence[Head], drawn: Sequence[Sequence[Head]]) -> list[Row]:
    """All arms of one item over one prefix."""
    sets = [("top", 0, chosen), *(("random", place, heads) for place, heads in enumerate(drawn))]
    spans, prefix = evidence(item), context(model, item)
    masks = [masked(spans, heads, name) for name, _, heads in sets]
    # Only the clean run decodes: one token at a time, a dozen arms would cost more than all the rest.
    text = model.tokenizer.decode(
        greedy(model, item, len(item.answer_ids) + MORE_TOKENS, prefix), skip_special_tokens=True
    )
    answered = bool(string_match_all(text, item.references) == 1.0)
    clean, *outcomes = forced(model, item, [(), *masks], prefix)
    gold = _logprob(clean, item)
    return [
        {
            "item": number,
            "seed": item.seed,
            "arm": arm,
            "draw": draw,
            "heads": " ".join(f"{layer}:{head}" for layer, head in heads),
            "n_heads": len(heads),
            "delta_logprob": _logprob(outcome, item) - gold,
            "kl": float(kl_divergence(clean.logits[:-1], outcome.logits[:-1]).sum()),
            "answered": answered,
            "unchanged": not bool(argmax_flips(clean.logits[:-1], outcome.logits[:-1]).any()),
        }
        for (arm, draw, heads), outcome in zip(sets, outcomes, strict=True)
    ]


def _logprob(outcome: Any, item: Item) -> float:
    """ln p of the gold answer; the last row of logits lies behind it."""
    return float(answer_logprobs(outcome.logits[:-1], item.answer_ids).sum())


def _about(
    chosen: Sequence[Head], others: dict[int, list[int]], scores: Array, draws: int, n_items: int
) -> dict[str, Any]:
    """What was compared with what: heads by layer, and how many a random set lacks."""
    mine = by_layer(chosen)
    short = {layer: len(heads) - len(others[layer]) for layer, heads in mine.items() if len(heads) > len(others[layer])}
    return {
        "k": len(chosen),
        "draws": draws,
        "n_items": n_items,
        "heads": [[layer, head, float(scores[layer, head])] for layer, head in chosen],
        "heads_by_layer": {layer: len(heads) for layer, heads in mine.items()},
        "others_by_layer": {layer: len(heads) for layer, heads in others.items()},
        "short": sum(short.values()),
        "short_layers": sorted(short),
        "scored_zero": sum(float(scores[head]) == 0.0 for head in chosen),
    }


def _tested(frame: pd.DataFrame, seed: int) -> dict[str, Any]:
    """The paired test over answered items; numbers are None, with the reason, where there is none."""
    counts = {"n": 0, "n_answered": 0, "p_attainable": None, "cannot_reject": True}
    answered = frame[frame["answered"]]
    if not len(answered):
        empty = dict.fromkeys(("top_k", "random_k", "difference", "ci_low", "ci_high", "ci_method", "p_signflip"))
        return empty | counts | {"why": f"the clean run answers none of {frame['item'].nunique()} items"}
    means = answered.groupby(["item", "arm"])[["delta_logprob", "kl", "unchanged"]].mean().unstack("arm")
    paired = (means["delta_logprob"]["top"] - means["delta_logprob"]["random"]).to_numpy(float)
    interval, test = stats.mean_interval(paired, seed=seed), stats.sign_flip(paired, seed=seed)
    found: dict[str, Any] = {
        "top_k": float(means["delta_logprob"]["top"].mean()),
        "random_k": float(means["delta_logprob"]["random"].mean()),
        "difference": interval.mean,
        "ci_low": interval.low,
        "ci_high": interval.high,
        "ci_method": interval.method,
        "p_signflip": test.p,
        "p_attainable": test.p_attainable,
        "cannot_reject": test.cannot_reject_at,
        "n": test.n,
        "n_answered": len(paired),
    }
    for name in ("kl", "unchanged"):
        found |= {f"{name}_{arm}": float(means[name][arm].mean()) for arm in ("top", "random")}
    return found

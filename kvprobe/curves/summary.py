"""From answers to curves: the mean score of every policy at every size, with its interval, and paired differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe import stats
from kvprobe.curves.answers import FULL
from kvprobe.curves.settings import Settings
from kvprobe.eviction.policies import ratio

if TYPE_CHECKING:
    import pandas as pd

VALUE_STAGE = "+two_stage"


def summarise(answers: pd.DataFrame, settings: Settings) -> dict[str, Any]:
    """``rows`` (one a policy and size), ``full`` (the whole cache) and ``pairs`` (with against without a second stage).

    Parameters
    ----------
    answers
        One row an item × policy × cache, with ``kept``, ``score``, ``logprob``.
    """
    full = answers[answers["policy"] == FULL]
    whole = _row(full, settings.seed) | {"logprob": float(full["logprob"].mean())}
    rows = [
        {
            "policy": policy,
            "cache": float(ratio(cache)),
            **_row(group, settings.seed),
            **_change(group, full),
            **_notes(group),
        }
        for policy, cache, group in _groups(answers, settings)
    ]
    return {"rows": rows, "full": whole, "pairs": list(_pairs(answers, settings))}


def _groups(answers: pd.DataFrame, settings: Settings) -> Iterable[tuple[str, str, pd.DataFrame]]:
    for policy in settings.names:
        for cache in settings.caches:
            yield policy, cache, answers[(answers["policy"] == policy) & (answers["cache"] == cache)]


def _row(group: pd.DataFrame, seed: int) -> dict[str, Any]:
    """Mean score over items in [0, 1] with its interval."""
    interval = stats.auroc_interval(group["score"].to_numpy(), seed=seed)
    return {
        "kept": float(group["kept"].mean()),
        "score": interval.mean,
        "ci_low": interval.low,
        "ci_high": interval.high,
        "n": interval.n,
        "method": interval.method,
    }


def _change(group: pd.DataFrame, full: pd.DataFrame) -> dict[str, Any]:
    """Mean change of the gold answer's log-probability against the full cache of the same item, in nats."""
    merged = group.merge(full[["item", "logprob"]], on="item", suffixes=("", "_full"))
    return {"delta_logprob": float((merged["logprob"] - merged["logprob_full"]).mean())}


def _notes(group: pd.DataFrame) -> dict[str, Any]:
    """Facts of the method: as they are where all items agree, else their mean (of a yes: the share of items)."""
    notes = list(group["notes"])
    merged = {}
    for key in dict.fromkeys(key for each in notes for key in each):
        values = [each[key] for each in notes if key in each]
        agree = all(value == values[0] for value in values)
        merged[key] = values[0] if agree else float(np.mean(values))
    return {"notes": merged} if merged else {}


def _pairs(answers: pd.DataFrame, settings: Settings) -> Iterable[dict[str, Any]]:
    """Within-item differences of a policy with the second stage and the same one without, where both were run."""
    for policy in settings.names:
        base = policy.removesuffix(VALUE_STAGE)
        if base == policy or base not in settings.names:
            continue
        for cache in settings.caches:
            ours, theirs = (_scores(answers, name, cache) for name in (policy, base))
            for measure in ("score", "logprob"):
                yield {"policy": policy, "base": base, "cache": float(ratio(cache)), "measure": measure} | _difference(
                    ours[measure].to_numpy() - theirs[measure].to_numpy(), settings.seed
                )


def _scores(answers: pd.DataFrame, policy: str, cache: str) -> pd.DataFrame:
    chosen = answers[(answers["policy"] == policy) & (answers["cache"] == cache)]
    return chosen.sort_values("item").set_index("item")


def _difference(values: np.ndarray[Any, Any], seed: int) -> dict[str, Any]:
    interval, test = stats.mean_interval(values, seed=seed), stats.sign_flip(values, seed=seed)
    return {
        "difference": interval.mean,
        "ci_low": interval.low,
        "ci_high": interval.high,
        "n": interval.n,
        "p_sign_flip": test.p,
        "p_attainable": test.p_attainable,
    }


def worst_receipt(answers: Sequence[Any]) -> float:
    """Smallest retained mass of any row of any arm."""
    return min(answer.smallest_retained for answer in answers)

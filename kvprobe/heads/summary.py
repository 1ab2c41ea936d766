"""From a finished scan to the numbers that are printed and stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvprobe.errors import TaskError
from kvprobe.heads.measuring import Scan
from kvprobe.heads.repeats import stability
from kvprobe.heads.scanning import THRESHOLD, Trial, share, top
from kvprobe.heads.single_heads import agreement, spearman

Array = NDArray[np.float64]
SHOWN = 20
"""Heads listed in the JSON; the table has all."""


def summarise(scan: Scan) -> dict[str, Any]:
    """All numbers as plain values (see the README for each key)."""
    settings = scan.settings
    scores = scan.scores
    return {
        "retrieval": _scored(scan, "retrieval"),
        "reasoning": _scored(scan, "reasoning"),
        "rank_correlation": _correlation(scores["retrieval"], scores["reasoning"]),
        "stability": _stable(scan),
        "causal": {"top_k": None, "why": scan.why_unchecked} if scan.causal is None else scan.causal.summary,
        "knockouts": None if scan.single is None else agreement(scan.single),
        "first_layers": scan.rule,
        "profile": None,
        "seeds": list(settings.grid.seeds),
    }


def _scored(scan: Scan, kind: str) -> dict[str, Any]:
    """Top heads and share of one kind, and how many trials they rest on."""
    trials, scores, settings = scan.of(kind), scan.scores[kind], scan.settings
    about = {
        "task": (settings.reasoning_task or settings.grid.task) if kind == "reasoning" else settings.grid.task,
        "threshold": settings.threshold,
        "n": len(trials),
        "n_kept": sum(each.kept(kind) for each in trials),
        "kept_if": f"{'ROUGE-1 recall' if kind == 'retrieval' else 'token F1'} > {THRESHOLD:g}",
        "span": settings.span,
    }
    if scores is None:
        why = f"no answer of {len(trials)} has {about['kept_if']}"
        return about | {"share": None, "n_heads_at_threshold": 0, "top": [], "why": why}
    at = int((scores >= settings.threshold).sum())
    listed = [[layer, head, score] for layer, head, score in top(scores, SHOWN)]
    return about | {"share": share(scores, settings.threshold), "n_heads_at_threshold": at, "top": listed}


def _correlation(one: Array | None, other: Array | None) -> float | None:
    """Spearman's ρ over heads of the two kinds of score; None where one is constant, or was not answered."""
    return None if one is None or other is None else spearman(one.ravel(), other.ravel())


def _stable(scan: Scan) -> dict[str, Any]:
    """Agreement of the first two seeds of the grid; None with the reason where there is no second."""
    empty = {"rho": None, "ci_low": None, "ci_high": None}
    groups = [by_seed(scan.trials, seed) for seed in scan.settings.grid.seeds[:2]]
    if len(groups) < 2:
        return empty | {"why": "one seed: nothing to compare (--seeds 2)"}
    try:
        found = stability(groups[0], groups[1], k=scan.settings.k, seed=scan.settings.seed)
    except TaskError as error:
        return empty | {"why": str(error)}
    constant = {"why": "a seed's scores are all the same"} if math.isnan(found.rho) else {}
    return found.to_dict() | ({"rho": None} | constant if constant else {})


def by_seed(trials: Sequence[Trial], seed: int) -> list[Trial]:
    """The trials of one seed, in order."""
    return [each for each in trials if each.cell.seed == seed]

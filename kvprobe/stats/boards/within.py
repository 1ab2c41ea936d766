"""Measures of one item: how well a score orders its right rollouts above its wrong ones, ties in random order."""

from __future__ import annotations

import math

import numpy as np

from kvprobe.stats.auroc import auroc
from kvprobe.stats.checks import Bools, Floats


def item_auroc(label: Bools, score: Floats) -> float:
    """P(a right rollout outscores a wrong one), ties 1/2; NaN for one class."""
    return auroc(score[label], score[~label])


def item_aurc(label: Bools, score: Floats) -> float:
    """Mean over k of the expected error rate among the k highest scores, tied scores in random order."""
    _, place, size = np.unique(-score, return_inverse=True, return_counts=True)
    errors = np.bincount(place, weights=~label) / size  # a tied block's expected error at each of its ranks
    return float(np.mean(np.cumsum(np.repeat(errors, size)) / np.arange(1, label.size + 1)))


def item_e_aurc(label: Bools, score: Floats) -> float:
    """`item_aurc` minus that of the item's own oracle, which ranks all right rollouts first."""
    return max(0.0, item_aurc(label, score) - item_aurc(label, label.astype(np.float64)))  # rounding may dip below


def item_hit(label: Bools, score: Floats, k: int) -> float:
    """P(the top k hold a correct rollout) over random order of tied scores: hypergeometric in the block at the cut."""
    cut = np.sort(score)[-k]
    if label[score > cut].any():
        return 1.0
    tied, right, room = int((score == cut).sum()), int(label[score == cut].sum()), k - int((score > cut).sum())
    return 1 - math.comb(tied - right, room) / math.comb(tied, room)

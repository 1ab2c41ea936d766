"""Boards of repeated rollouts: does a score tell an item's right rollouts from its wrong ones?

A board is a DataFrame with columns `item`, `rollout`, `label` (1 = correct), `score` (higher = more confident) and,
for the length baseline and strata, `length`. Every measure is computed within the item and averaged over items, which
are what the interval resamples. Pooling rollouts of several items mixes "harder item" with "worse rollout" (Simpson's
paradox) and must be asked for by name. Eviction scores have neither rollouts nor a binary outcome: refused here.

`rollouts` checks a board and cuts it into items, `within` measures one item, `measures` averages over items, `length`
asks what rollout length alone would have told; `results` holds the records.
"""

from kvprobe.stats.boards.length import Direction, length_baseline, length_strata
from kvprobe.stats.boards.measures import acc_at_k, aurc, board_auroc, e_aurc
from kvprobe.stats.boards.results import BoardResult, LengthStrata
from kvprobe.stats.checks import Bools

__all__ = [
    "BoardResult",
    "Bools",
    "Direction",
    "LengthStrata",
    "acc_at_k",
    "aurc",
    "board_auroc",
    "e_aurc",
    "length_baseline",
    "length_strata",
]

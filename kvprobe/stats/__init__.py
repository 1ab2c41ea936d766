"""Statistics of paired designs: the unit is the item, the pairing within it is kept, every random step takes a seed.

=================  ==========================================================================================
`auroc`            AUROC of one item, of many columns at once, of a list of items
`intervals`        intervals of a mean, of AUROCs and of shares; `bca` has the bootstrap of many columns
`permutation`      the primary test: is the target exchangeable with the other spans of its item?
`maxt`             its family-wise twin over heads
`signs`            tests of paired differences that stand beside it: sign flip, Wilcoxon
`shares`           many columns: the share with a negative mean, Wilcoxon's test of each
`corrections`      Holm, Benjamini-Hochberg, and whether a test could have rejected at all
`balance`          how alike targets and their controls are, before and after matching
`levels`           what level a permutation test holds exactly, and where a simulated rate must lie
`boards`           measures of repeated rollouts: AUROC, risk against coverage, accuracy at k, length
`records`          the frozen results; each can be written to a manifest with ``to_dict``
=================  ==========================================================================================

Under the tests lie `design` (either statistic as a sum over the target's spans), `assignments` (the target sets that
the null allows) and `exact` (distributions without drawing); `checks` refuses what no statistic is defined on.
A p-value never travels without the smallest one that its test could have attained. scipy and pandas are imported on
use: importing this package costs numpy only.
"""

from kvprobe.stats.auroc import auroc, auroc_many, item_auroc
from kvprobe.stats.balance import Balance, LargestRatio, max_abs_ln_ratio, standardised_difference
from kvprobe.stats.bca import bca_many
from kvprobe.stats.boards import (
    BoardResult,
    Direction,
    LengthStrata,
    acc_at_k,
    aurc,
    board_auroc,
    e_aurc,
    length_baseline,
    length_strata,
)
from kvprobe.stats.checks import Bools, Floats
from kvprobe.stats.corrections import benjamini_hochberg, cannot_reject, holm
from kvprobe.stats.design import Statistic
from kvprobe.stats.intervals import auroc_interval, clopper_pearson, mean_interval
from kvprobe.stats.levels import attainable_level, rejection_band
from kvprobe.stats.maxt import max_t_within_item
from kvprobe.stats.permutation import permutation_within_item
from kvprobe.stats.ratios import ratio_interval
from kvprobe.stats.records import Interval, ItemAuroc, MaxTResult, Record, TestResult
from kvprobe.stats.shares import ColumnShare, WilcoxonMany, share_interval, wilcoxon_many
from kvprobe.stats.signs import sign_flip, wilcoxon

__all__ = [
    "Balance",
    "BoardResult",
    "Bools",
    "ColumnShare",
    "Direction",
    "Floats",
    "Interval",
    "ItemAuroc",
    "LargestRatio",
    "LengthStrata",
    "MaxTResult",
    "Record",
    "Statistic",
    "TestResult",
    "WilcoxonMany",
    "acc_at_k",
    "attainable_level",
    "aurc",
    "auroc",
    "auroc_interval",
    "auroc_many",
    "bca_many",
    "benjamini_hochberg",
    "board_auroc",
    "cannot_reject",
    "clopper_pearson",
    "e_aurc",
    "holm",
    "item_auroc",
    "length_baseline",
    "length_strata",
    "max_abs_ln_ratio",
    "max_t_within_item",
    "mean_interval",
    "permutation_within_item",
    "ratio_interval",
    "rejection_band",
    "share_interval",
    "sign_flip",
    "standardised_difference",
    "wilcoxon",
    "wilcoxon_many",
]

"""What no statistic is defined on is refused."""

import numpy as np
import pytest

from kvprobe import stats
from kvprobe.errors import StatisticsError


@pytest.mark.parametrize("bad", [
    lambda: stats.permutation_within_item([[1, 2]], [[True, False]], "median"),
    lambda: stats.permutation_within_item([[1, 2]], []),
    lambda: stats.permutation_within_item([[1, 2]], [[True]]),
    lambda: stats.permutation_within_item([[1, 2]], [[2, 0]]),
    lambda: stats.permutation_within_item([[1, np.nan]], [[1, 0]], "auroc"),
    lambda: stats.permutation_within_item([[1, np.inf]], [[1, 0]]),
    lambda: stats.permutation_within_item([[[1, 2]]], [[1, 0]]),
    lambda: stats.permutation_within_item([[1, 2]], [[1, 0]], seed=None),
    lambda: stats.permutation_within_item([[1, 2]], [[1, 0]], draws=0),
    lambda: stats.max_t_within_item([], []),
    lambda: stats.max_t_within_item([np.ones((2, 3)), np.ones((2, 4))], [[1, 0]] * 2),
    lambda: stats.max_t_within_item([np.ones((2, 0))], [[1, 0]]),
    lambda: stats.mean_interval([1, np.nan]),
    lambda: stats.mean_interval([[1.0]]),
    lambda: stats.mean_interval(["a"]),
    lambda: stats.mean_interval([1, 2], level=95),
    lambda: stats.mean_interval([1, 2], seed=1.5),
    lambda: stats.auroc_interval([0.5, 1.2]),
    lambda: stats.sign_flip([np.nan]),
    lambda: stats.holm([0.1, np.nan]),
    lambda: stats.benjamini_hochberg([np.nan]),
    lambda: stats.holm([0.1, 1.2]),
    lambda: stats.cannot_reject(0.1, 0.05, family=0),
])  # fmt: skip
def test_mistakes_are_quoted(bad):
    with pytest.raises(StatisticsError):
        bad()

"""Target sets under the null."""

import numpy as np

from kvprobe.stats import assignments
from kvprobe.stats.design import design_of


def test_monte_carlo_draws_every_subset_alike():
    design = design_of([np.arange(5.0)], [np.array([1, 1, 0, 0, 0])], "auroc", ndim=1)
    chosen = np.sort(assignments.drawn(design, 0, 20_000)[0], axis=1)
    _, counts = np.unique(chosen, axis=0, return_counts=True)
    assert len(counts) == 10
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9  # chi2(9), 0.1 %

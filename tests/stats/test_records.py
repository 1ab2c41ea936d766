"""Results are frozen and can be written."""

import dataclasses
import json

import pytest
from paired_designs import make_items

from kvprobe import stats


def test_results_are_frozen_and_plain():
    scores, masks = make_items(0, (4, 4, 4), heads=3)
    results = [
        stats.mean_interval([0.1, 0.5, 0.2]),
        stats.item_auroc([([1], [0])]),
        stats.max_t_within_item(scores, masks),
        stats.permutation_within_item([w[:, 0] for w in scores], masks),
    ]
    for result in results:
        json.dumps(result.to_dict())
        with pytest.raises(dataclasses.FrozenInstanceError):
            result.n = 3
    assert results[0].to_dict()["beside"]["method"] == "BCa"

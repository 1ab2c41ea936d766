"""Layers of every kind for the scorers' tests."""

import eviction_layers as slow
import pytest

LAYERS = [(name, gone) for name in slow.KINDS for gone in (False, True)]
LOST = {1: [3], 2: [6, 1], 4: [6, 0, 2, 9]}


@pytest.fixture(params=LAYERS, ids=lambda p: f"{p[0]}{'-ragged' if p[1] else ''}")
def lay(request):
    """A layer of every kind, whole and left-padded."""
    name, gone = request.param
    full = slow.kind(name, seed=len(name))
    return slow.ragged(full, LOST[full.n_kv_heads]) if gone else full


@pytest.fixture(params=slow.KINDS)
def whole(request):
    """A layer of every kind whose heads hold the same entries."""
    return slow.kind(request.param, seed=len(request.param))

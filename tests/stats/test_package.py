"""The package as a whole: its names, its cost, and no hidden state."""

import subprocess
import sys
from importlib import import_module

import numpy as np
from paired_designs import make_items

from kvprobe import stats


def test_board_measures_are_public_in_both_places():
    assert set(stats.boards.__all__) < set(stats.__all__)
    assert all(getattr(stats, name) is getattr(stats.boards, name) for name in stats.boards.__all__)


def test_auroc_is_the_function_and_not_the_module_of_that_name():
    import_module("kvprobe.stats.auroc")
    assert stats.auroc([1.0], [0.0]) == 1


def test_import_is_cheap():
    heavy = "[m for m in ('scipy', 'pandas', 'torch') if m in sys.modules]"
    code = f"import sys, kvprobe.stats; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_global_state():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    scores, masks = make_items(0, (6,) * 9)
    first = stats.permutation_within_item(scores, masks, draws=99, seed=1)
    kept = [w.copy() for w in scores]
    assert first == stats.permutation_within_item(scores, masks, draws=99, seed=1)
    stats.mean_interval(np.arange(12.0))
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    assert all((a == b).all() for a, b in zip(kept, scores, strict=True))

"""Boards of rollouts for the tests, and the slow way to measure one."""

import itertools

import numpy as np
import pandas as pd

from kvprobe.stats import boards

MEASURES = (boards.board_auroc, boards.aurc, boards.e_aurc)


def board(items, lengths=None):
    """Board from one [(label, score), ...] list an item."""
    rows = [(i, r, label, float(score)) for i, item in enumerate(items) for r, (label, score) in enumerate(item)]
    table = pd.DataFrame(rows, columns=["item", "rollout", "label", "score"])
    return table if lengths is None else table.assign(length=lengths)


def random_board(seed, items=12, rollouts=8, signal=1.0, integer=False):
    rng, rows = np.random.default_rng(seed), []
    for i in range(items):
        label = rng.random(rollouts) < rng.uniform(0.2, 0.8)
        score = signal * label + rng.normal(size=rollouts)
        length = rng.integers(50, 500, rollouts)
        rows += [(f"q{i}", r, label[r], score[r], length[r]) for r in range(rollouts)]
    table = pd.DataFrame(rows, columns=["item", "rollout", "label", "score", "length"])
    return table.assign(score=table["score"].round()) if integer else table


def orders(item):
    """All orders of an item's rollouts by falling score, ties in every order."""
    every = itertools.permutations(item)
    return [p for p in every if all(a[1] >= b[1] for a, b in itertools.pairwise(p))]


def slow_aurc(item):
    return np.mean([
        np.mean([np.mean([not label for label, _ in p[:k]]) for k in range(1, len(p) + 1)]) for p in orders(item)
    ])  # fmt: skip

"""Requests to share a cache out, and what plain Python makes of them. Nothing here uses a budget of kvprobe's."""

import math
import random

import torch
from hypothesis import strategies as st

from kvprobe.eviction.budgets import Request


def request(scores, reserved, base, cache=0.5, group=1, length=None):
    """A request from nested lists [L][J][n]."""
    scores = [torch.tensor(layer, dtype=torch.float32) for layer in scores]
    reserved = [torch.tensor(layer, dtype=torch.bool) for layer in reserved]
    return Request(base, length or scores[0].shape[1], cache, scores, reserved, group)


@st.composite
def requests(draw, *, most_pads=0, window=False, n_layers=None):
    """Small requests: ties, any entries reserved (or the last w), up to ``most_pads`` −∞ a row, any base that fits."""
    n_layers, n_sets, n = n_layers or draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(2, 14))
    w, levels = draw(st.integers(0, n // 3)), draw(st.sampled_from([1, 2, 5, 1000]))
    rng = random.Random(draw(st.integers(0, 2**32)))
    scores, reserved = [], []
    for _ in range(n_layers):
        pads = [rng.randint(0, min(most_pads, n - max(w, 1))) for _ in range(n_sets)]
        scores.append([[-math.inf if t < p else rng.randint(0, levels) / 8 - 0.25 for t in range(n)] for p in pads])
        marks = [range(n - w, n) if window else rng.sample(range(n), rng.randint(0, w)) for _ in range(n_sets)]
        reserved.append([[t in each for t in range(n)] for each in marks])
    enough = min(sum(present(row) for row in layer) // n_sets for layer in scores)
    base = draw(st.integers(min(max(w, 1), enough), enough))
    return request(scores, reserved, base, cache=f"{base}/{n}")


def present(row):
    """Entries of a row that are there."""
    return sum(score > -math.inf for score in row)


def tables(asked):
    """Scores and reserved marks as nested lists; what is not there is not reserved."""
    scores = [layer.tolist() for layer in asked.scores]
    reserved = [layer.tolist() for layer in asked.reserved]
    for layer, marks in zip(scores, reserved, strict=True):
        for row, flags in zip(layer, marks, strict=True):
            flags[:] = [flag and score > -math.inf for flag, score in zip(flags, row, strict=True)]
    return scores, reserved


def counts(table):
    """Numbers of True per set, [L][J]."""
    return [[sum(row) for row in layer] for layer in table]


def best(layers, marked, places):
    """[L][J] of how many entries are among the ``places`` first by (marked, −score, layer, head, position)."""
    entries = [
        (not marked[i][j][t], -score, i, j, t)
        for i, layer in enumerate(layers)
        for j, row in enumerate(layer)
        for t, score in enumerate(row)
        if score > -math.inf
    ]
    result = [[0] * len(layer) for layer in layers]
    for _, _, i, j, _ in sorted(entries)[:places]:
        result[i][j] += 1
    return result

"""A catalogue of masks on one scene, each with what it means written out by hand for the oracles.

Scene: 26 prompt tokens, a suffix of 8 (positions 18 … 25), a continuation of 3 (26 … 28), on tiny models of 3 layers
and 6 heads whose windows are 5 or 6.
"""

import math

import torch
from oracles import Cutout, bias_table

from kvprobe import KVMask

N, SUFFIX, CONTINUED = 26, 8, (41, 300, 7)
TOTAL = N + len(CONTINUED)
LAYERS, HEADS = (0, 1, 2), (0, 1, 2, 3, 4, 5)


def ids(seed=0, n=N):
    return torch.randint(3, 320, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def mask(keys, layers=None, heads=None, queries="suffix", beta=math.inf, on_empty="raise"):
    """The same mask twice: as kvprobe takes it, and resolved by hand."""
    spans = (tuple(keys),) if isinstance(keys[0], int) else tuple(keys)
    chosen = LAYERS if layers is None else (layers,) if isinstance(layers, int) else tuple(layers)
    if isinstance(heads, dict):
        chosen = tuple(heads) if layers is None else chosen
        by_layer = heads
    else:
        by_layer = dict.fromkeys(LAYERS, HEADS if heads is None else (heads,) if isinstance(heads, int) else heads)
    cutout = Cutout(spans, chosen, by_layer, queries, beta, on_empty == "keep_self")
    return KVMask(keys, layers, heads, queries, beta, on_empty), cutout


ARMS = {
    "clean": [],
    "in the prefix": [mask([(3, 6)])],
    "a bare pair": [mask((3, 6))],
    "position 0": [mask([(0, 1)])],
    "position 0 for everything after it": [mask([(0, 1)], queries="after")],
    "two spans": [mask([(2, 4), (10, 12)])],
    "spans that touch": [mask([(10, 12), (12, 15)], queries="after")],
    "overlapping spans": [mask([(9, 13), (11, 15)])],
    "overlapping spans, finite": [mask([(9, 13), (11, 15)], beta=0.7)],
    "the last context token": [mask([(17, 18)])],
    "across the border": [mask([(15, 21)], queries="after")],
    "own rows": [mask([(20, 22)], queries="after")],
    "own rows under the suffix": [mask([(20, 22)])],
    "own rows, their own keys kept": [mask([(18, 23)], on_empty="keep_self")],
    "one layer": [mask([(13, 17)], layers=1)],
    "two layers": [mask([(13, 17)], layers=[0, 2])],
    "one head": [mask([(14, 17)], heads=4)],
    "two heads": [mask([(14, 17)], heads=[0, 5])],
    "a layer's heads": [mask([(14, 17)], layers=2, heads=[1, 2])],
    "heads by layer": [mask([(14, 17)], heads={0: (1, 2), 2: (5,)})],
    "heads by layer, one layer chosen": [mask([(14, 17)], layers=2, heads={0: (1, 2), 2: (5,)})],
    "after a span": [mask([(3, 5)], queries="after")],
    "generated tokens only": [mask([(22, 25)], queries="generated")],
    "three positions": [mask([(5, 9)], queries=(8, 20, 27))],
    "finite": [mask([(14, 17)], beta=0.7)],
    "strong, on two heads": [mask([(12, 18)], heads=[2, 3], beta=25.0)],
    "finite, own rows": [mask([(16, 21)], queries="after", beta=2.0)],
    "two masks": [mask([(3, 6)]), mask([(14, 17)], heads=[1], queries="after")],
    "two masks that overlap": [mask([(12, 17)], beta=1.5), mask([(15, 18)], layers=[0, 1])],
    "two finite masks that add up": [mask([(12, 17)], beta=0.5), mask([(15, 18)], beta=0.25)],
    "everything, zero": [mask([(0, 22)], queries=(21,), on_empty="zero")],
    "everything, keep_self": [mask([(0, N)], on_empty="keep_self")],
    "everything of one head, zero": [mask([(0, N)], heads={1: (3,)}, on_empty="zero")],
    "a whole window, zero": [mask([(13, 19)], queries=(18,), on_empty="zero")],
    "the whole beginning, zero": [mask([(0, 3)], queries=(0, 2, 9), on_empty="zero")],
}


def arm(name):
    """The tuple of interventions of one arm."""
    return tuple(part for part, _ in ARMS[name])


def arms():
    return [arm(name) for name in ARMS]


def table(name, total=TOTAL, n=N, suffix=SUFFIX):
    """[L, H, total, total] additive bias of one arm, by loops."""
    cutouts = [cutout for _, cutout in ARMS[name]]
    return bias_table(cutouts, total, n=n, suffix=suffix, n_layers=len(LAYERS), n_heads=len(HEADS))

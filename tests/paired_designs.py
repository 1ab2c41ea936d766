"""Exchangeable items for the tests of paired designs, their slow oracle, and bands for simulated rates."""

import itertools
import math

import numpy as np

RNG = np.random.default_rng


def make_items(seed, sizes, targets=1, heads=None, draw="normal", ties=False):
    """Exchangeable items: scores drawn alike for every span, target set uniform."""
    rng, scores, masks = RNG(seed), [], []
    for n in sizes:
        shape = n if heads is None else (n, heads)
        values = getattr(rng, draw)(size=shape)
        scores.append(np.round(values) if ties else values)
        masks.append(rng.permutation(np.arange(n) < targets))
    return scores, masks


def within(statistic, w, mask):
    """One item's centred statistic, the slow way."""
    if statistic == "mean_difference":
        return w[mask].mean() - w[~mask].mean()
    pairs = [(a > b) + 0.5 * (a == b) for a in w[mask] for b in w[~mask]]
    return np.mean(pairs) - 0.5


def brute(statistic, scores, masks):
    """All joint assignments: observed T and the array of permuted T."""
    tables = []
    for w, mask in zip(scores, masks, strict=True):
        sets = [np.isin(np.arange(len(w)), c) for c in itertools.combinations(range(len(w)), int(mask.sum()))]
        tables.append([within(statistic, w, chosen) for chosen in sets])
    permuted = np.array([np.mean(choice) for choice in itertools.product(*tables)])
    return np.mean([within(statistic, w, m) for w, m in zip(scores, masks, strict=True)]), permuted


def upper_band(rate, trials, z=3.3):
    return rate + z * math.sqrt(rate * (1 - rate) / trials)


def lower_band(rate, trials, z=3.3):
    return rate - z * math.sqrt(rate * (1 - rate) / trials)

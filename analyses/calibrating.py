"""How often a test rejects where nothing is there: pseudo-targets with placebos of their own, drawn again and again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvprobe.placebo import KeySet
    from kvprobe.stats import Floats

ALPHA, CONFIDENCE = 0.05, 0.99


def groups(
    sets: Sequence[KeySet],
    strengths: Floats,
    choose: Callable[[Sequence[KeySet], int], list[KeySet]],
    k: int,
    caliper: float,
    targets: Sequence[int] | None = None,
    sharing: bool = False,
    tested: bool = False,
) -> list[list[int]]:
    """Each set as a pseudo-target, and its placebos by the library's own rule.

    Parameters
    ----------
    sets, strengths
        Candidates of one remedy in one item, and how strong a blow each is in the measure that is matched.
    choose
        The remedy's rule for several placebos (:func:`kvprobe.placebo.pools.disjoint` or ``dissimilar``).
    k, caliper
        As in :func:`kvprobe.placebo.match`; candidates that share a key with the pseudo-target are none.
    targets
        Numbers of the sets that may be pseudo-targets, which then are no candidates; None: all, and all are both.
    sharing
        Candidates may share keys with the pseudo-target, as far as those that ``dissimilar`` picks may with each other.
    tested
        Only those placebos that the primary test uses: the ones that share no key with one another.

    Returns
    -------
    list of list of int
        ``[target, placebo, …, placebo]`` of every pseudo-target that has k placebos.
    """
    from kvprobe.placebo.keysets import jaccard
    from kvprobe.placebo.pools import SIMILAR, apart
    from kvprobe.placebo.search import Goal, Pool

    barred, most = set() if targets is None else {*targets}, SIMILAR if sharing else 0.0
    found = []
    for t in range(len(sets)) if targets is None else targets:
        others = [j for j in range(len(sets)) if j not in {t, *barred} and jaccard(sets[j], sets[t]) <= most]
        exact = strengths[others]
        # Every strength is known already, so neither scope nor θ is ever asked for.
        goal = Goal(None, sets[t], "perturbation", float(strengths[t]), math.nan, k, caliper)
        chosen = Pool([sets[j] for j in others], exact, exact, choose).pick(goal)
        if chosen:
            kept = apart([sets[others[i]] for i in chosen]) if tested else [True] * len(chosen)
            found.append([t, *(others[i] for i, keep in zip(chosen, kept, strict=True) if keep)])
    return found


def calibrate(items: Sequence[Sequence[Any]], draws: int, seed: int = 0, permutations: int = 9999) -> dict[str, Any]:
    """Rate of p < 0.05 over draws of one pseudo-target an item, and the band around the level that can be attained.

    Parameters
    ----------
    items
        An item's pseudo-targets, each with its effect and then its placebos'; their numbers may differ. Items without
        any are no part.
    draws, seed
        Draws; the test's own Monte Carlo is seeded by the draw.
    permutations
        Of the test, where it is not exact; the level accounts for them.

    Returns
    -------
    dict
        ``rate``: share of p < 0.05 among draws that are not all zero; ``level``: attainable, strict as the rate is,
        mean over draws; ``low``, ``high``: 99 % band; ``inside``; ``draws``, ``all_zero``: counted, and excluded;
        ``hurts``: share of the rejections where the pseudo-target hurts more; ``signflip``, ``wilcoxon``: their rates;
        ``farthest``: share of pseudo-targets farthest from the mean of their group, mean over items;
        ``farthest_expected``: the same if they are exchangeable with their placebos, mean 1 / size of a group;
        ``placebos``: mean number of placebos; ``difference``: mean pseudo-target − placebos; ``n_items``;
        ``datasets``: log10 of the number of different draws there are.
    """
    import numpy as np

    from kvprobe import stats

    live = [[np.asarray(row, dtype=float) for row in each] for each in items if len(each)]
    rng = np.random.default_rng(seed)
    p: list[tuple[float, ...]] = []
    levels: dict[tuple[int, ...], float] = {}
    used: list[float] = []
    all_zero = 0
    for number in range(draws if live else 0):
        scores = [each[rng.integers(len(each))] for each in live]
        if not any(row.any() for row in scores):
            all_zero += 1
            continue
        sizes = tuple(len(row) for row in scores)
        primary = stats.permutation_within_item(
            scores, [np.arange(m) == 0 for m in sizes], seed=number, draws=permutations
        )
        key = tuple(sorted(sizes))
        if key not in levels:
            levels[key] = stats.attainable_level(len(live), key, ALPHA, primary.draws, strict=True)
        used.append(levels[key])
        differences = np.array([row[0] - row[1:].mean() for row in scores])
        beside = stats.sign_flip(differences, seed=number).p, stats.wilcoxon(differences).p
        p.append((primary.p, *beside, primary.statistic))
    level = math.fsum(used) / len(used) if used else 0.0
    return _summary(np.array(p).reshape(-1, 4), level, all_zero) | _exchangeable(live)


def _summary(p: Floats, level: float, all_zero: int) -> dict[str, Any]:
    from kvprobe import stats

    used, rejected = len(p), p[:, :3] < ALPHA
    low, high = stats.rejection_band(level, used, CONFIDENCE) if used else (math.nan, math.nan)
    rate, signflip, wilcoxon = rejected.mean(0) if used else [math.nan] * 3
    sides = p[rejected[:, 0], 3] < 0
    return {
        "rate": float(rate),
        "level": level if used else math.nan,
        "low": low,
        "high": high,
        "inside": bool(low <= rate <= high),
        "draws": used,
        "all_zero": all_zero,
        "hurts": float(sides.mean()) if len(sides) else math.nan,
        "signflip": float(signflip),
        "wilcoxon": float(wilcoxon),
    }


def _exchangeable(items: Sequence[Sequence[Floats]]) -> dict[str, Any]:
    """Why a rate may leave its band: what an exchangeable pseudo-target would be, and what it is."""
    import numpy as np

    if not items:
        names = ("farthest", "farthest_expected", "difference", "placebos")
        return dict.fromkeys(names, math.nan) | {"n_items": 0, "datasets": 0.0}
    shares, expected, differences = [], [], []
    for each in items:
        shares.append(np.mean([_farthest(row) for row in each]))
        expected.append(np.mean([1 / len(row) for row in each]))
        differences.append(np.mean([row[0] - row[1:].mean() for row in each]))
    return {
        "farthest": float(np.mean(shares)),
        "farthest_expected": float(np.mean(expected)),
        "placebos": float(np.mean([np.mean([len(row) - 1 for row in each]) for each in items])),
        "difference": float(np.mean(differences)),
        "n_items": len(items),
        "datasets": sum(math.log10(len(each)) for each in items),
    }


def _farthest(row: Floats) -> float:
    """1 if the first number is farthest from the mean of all, a share of it in a tie."""
    import numpy as np

    far = np.abs(row - row.mean())
    ties = np.isclose(far, far.max(), rtol=1e-9, atol=0)
    return float(ties[0] / ties.sum())

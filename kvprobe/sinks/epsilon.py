"""What ε does: to value masses, where it is meant, and inside the ratio, where it is not.

(A + ε) m gives every key ε m for being there (CriticalKV, arXiv 2502.03805): harmless to keys with s ≫ ε, and all
there is to a key with s ≪ ε. Inside ρ it makes m (1 + ε / s), whose order is that of 1 / s wherever s ≪ ε.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvprobe.sinks import checks
from kvprobe.sinks.buckets import Buckets
from kvprobe.sinks.scores import LARGEST, Array, Scores, check_epsilon
from kvprobe.stats import auroc

EPSILONS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
CORRELATIONS = ("spearman_value_mass", "spearman_ratio_mass", "spearman_ratio_norm")


def epsilon_sweep(
    scores: Scores,
    buckets: Buckets,
    epsilons: Sequence[float] = EPSILONS,
    layers: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """The same numbers for every ε.

    Parameters
    ----------
    scores, buckets
        Of one prompt.
    epsilons
        0 ≤ ε ≤ 1e6, each.
    layers
        Layers to pool; all by default.

    Returns
    -------
    list of dict
        For each ε:

        ``epsilon``
        ``value_mass``
            bucket → mean over layers and heads of Σ (s + ε) m over its keys.
        ``value_mass_per_token``
            bucket → mean over the keys that a chosen query sees, mean over layers and heads; None where none is seen.
        ``auroc``
            P(s^val of an evidence token > s^val of a first4 token), s^val pooled over heads and layers; None without
            both.
        ``spearman_value_mass``
            Spearman of s^val(ε) with s^val(0), over keys within a head, mean over heads.
        ``spearman_ratio_mass``, ``spearman_ratio_norm``
            Spearman of ρ_ε = m (1 + ε/s) with −s, and with m, likewise: towards 1 in the first, ε has turned the ratio
            into rarity. Over keys with s > 0.

        Correlations are None where no head has two different values.

    Raises
    ------
    TheoryError
        No list of ε, one that is negative or above 1e6, or layers that the scores do not have.
    """
    checks.instance(scores, Scores, "scores", "what sinks.scores returns")
    checks.instance(buckets, Buckets, "buckets", "what sinks.buckets returns")
    given = checks.several(epsilons, "epsilons", f"a list of one or more numbers from 0 to {LARGEST:g}")
    checked = [check_epsilon(epsilon) for epsilon in given]
    chosen = sorted(scores.chosen(layers))
    ranked = _rank_correlations(scores, checked, chosen)
    return [_row(scores, buckets, epsilon, chosen) | found for epsilon, found in zip(checked, ranked, strict=True)]


def _row(scores: Scores, buckets: Buckets, epsilon: float, layers: list[int]) -> dict[str, Any]:
    table = scores.bucket_table(buckets, epsilon)
    by_bucket = table[table["layer"].isin(layers)].groupby("bucket", sort=False)
    pooled = scores.pooled("value_mass", epsilon=epsilon, layers=layers)
    return {
        "epsilon": epsilon,
        **{
            name: {key: _mean(part) for key, part in by_bucket[name]} for name in ("value_mass", "value_mass_per_token")
        },
        "auroc": _auroc(pooled, buckets),
    }


def _auroc(pooled: Array, buckets: Buckets) -> float | None:
    evidence, first = (pooled[list(buckets.keys[name])] for name in ("evidence", "first4"))
    evidence, first = evidence[~np.isnan(evidence)], first[~np.isnan(first)]
    return auroc(evidence, first) if evidence.size and first.size else None


def _rank_correlations(scores: Scores, epsilons: Sequence[float], layers: list[int]) -> list[dict[str, float | None]]:
    """One dict an ε; what does not depend on ε is ranked once a head."""
    found: list[dict[str, list[float]]] = [{name: [] for name in CORRELATIONS} for _ in epsilons]
    for s_layer, m_layer in zip(scores.mass[layers], scores.norms[layers], strict=True):
        for s, m in zip(s_layer, m_layer, strict=True):
            s, m = s[s > 0], m[s > 0]  # NaN is not above 0
            value, rarity, norm = (_ranks(each) for each in (s * m, -s, m))
            for epsilon, row in zip(epsilons, found, strict=True):
                with_value, inside = _ranks((s + epsilon) * m), _ranks(m * (1 + epsilon / s))
                pairs = ((with_value, value), (inside, rarity), (inside, norm))
                for name, pair in zip(CORRELATIONS, pairs, strict=True):
                    row[name].append(_pearson(*pair))
    return [{name: _mean(values) for name, values in row.items()} for row in found]


def _ranks(a: Array) -> Array:
    """Centred ranks of length 1, ties averaged; NaN where there are not two different values."""
    from scipy.stats import rankdata

    if a.size < 2 or np.ptp(a) == 0:
        return np.full(a.shape, np.nan)
    centred = rankdata(a) - (a.size + 1) / 2
    return np.asarray(centred / np.sqrt(centred @ centred))


def _pearson(a: Array, b: Array) -> float:
    """Correlation of two sets of ranks (:func:`_ranks`), which is Spearman's; NaN where there is none."""
    return float(a @ b) if a.size else float("nan")


def _mean(values: Iterable[float]) -> float | None:
    kept = [value for value in values if not np.isnan(value)]
    return float(np.mean(kept)) if kept else None

"""Tests of paired differences, beside the primary test: sign flip and Wilcoxon's signed ranks."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from kvprobe.stats.checks import NOISE, Floats, check, numbers
from kvprobe.stats.corrections import cannot_reject
from kvprobe.stats.exact import joint, tails
from kvprobe.stats.records import TestResult


def _differences(differences: ArrayLike) -> tuple[Floats, Floats]:
    """All differences, and the nonzero ones (zero up to rounding of the largest)."""
    d = numbers(differences, "differences")
    size = np.abs(d)
    return d, d[size > NOISE * size.max(initial=0.0)]


def _both_signs(sizes: Floats, observed: float, slack: float) -> tuple[float, float]:
    """p and its smallest attainable value over all signs of these sizes, for up to 2^16 sums a step."""
    law = joint([np.array([-v, v]) for v in sizes], 2**16)
    assert law is not None
    return tails(law, observed, slack)


def sign_flip(differences: ArrayLike, seed: int = 0, draws: int = 9999) -> TestResult:
    """Sign-flip test of paired differences [n], two-sided on the mean. It stands beside the primary test.

    Null: each difference is symmetric about 0, which T - mean(placebos) is not when outcomes are skewed (size 0.11 at
    nominal 0.05, n = 8, log-normal). Zeros carry no sign: they stay in the mean, are counted in `n_zero` and do not
    help to reach p_attainable = 2/2^(n - n_zero). Exact up to 16 nonzero differences, then (b + 1)/(draws + 1).
    All zero: p = 1, `degenerate`.
    """
    check(seed=seed, draws=draws)
    d, live = _differences(differences)
    zeros, mean = d.size - live.size, float(d.mean()) if d.size else math.nan
    if not live.size:
        return TestResult(mean, 1.0, 1.0, d.size, True, "sign flip: all differences are zero", True, 0, zeros, True)
    slack, observed, exact = NOISE * float(np.abs(live).sum()), abs(float(live.sum())), live.size <= 16
    if exact:
        p, attainable = _both_signs(live, observed, slack)
    else:
        signs = np.random.default_rng(seed).integers(0, 2, (draws, live.size)) * 2 - 1
        p = float((np.sum(np.abs(signs @ live) >= observed - slack) + 1) / (draws + 1))
        attainable = max(1 / (draws + 1), 2.0 ** (1 - live.size))
    method = f"sign flip, two-sided, {'exact' if exact else 'Monte Carlo'}, {zeros} of {d.size} differences zero"
    hopeless, used = cannot_reject(attainable), (None, None) if exact else (seed, draws)
    return TestResult(mean, p, attainable, d.size, exact, method, hopeless, 0, zeros, False, *used)


def wilcoxon(differences: ArrayLike) -> TestResult:
    """Wilcoxon signed-rank test of paired differences [n], two-sided on W+ - W-. Beside the primary test.

    Zeros are dropped and counted (`n_zero`), tied sizes share their midrank. Up to 50 nonzero differences exact:
    scipy's exact p, and given ties, where scipy approximates from n = 14 on, the conditional one. Beyond that scipy's
    normal approximation; `exact` says which. The statistic is min(W+, W-); `p_attainable` is the p
    of the same method had all signs agreed (2/2^n when exact). All zero: p = 1, `degenerate`.
    """
    d, live = _differences(differences)
    zeros = d.size - live.size
    if not live.size:
        return TestResult(math.nan, 1.0, 1.0, d.size, True, "Wilcoxon: all differences are zero", True, 0, zeros, True)
    from scipy.stats import rankdata
    from scipy.stats import wilcoxon as scipy_wilcoxon

    live = np.round(live / np.abs(live).max(), 12)  # ranks only: rounding must not split tied sizes
    ranks = rankdata(np.abs(live))
    up, down, exact = float(ranks[live > 0].sum()), float(ranks[live < 0].sum()), live.size <= 50
    if exact:
        p, attainable = _both_signs(ranks, up - down, 0.0)  # midranks are halves: sums exact, at most 2 n (n + 1)
    else:
        p, attainable = (float(scipy_wilcoxon(v, method="asymptotic").pvalue) for v in (live, np.abs(live)))
    method = f"Wilcoxon signed rank, two-sided, {'exact' if exact else 'asymptotic'}, {zeros} of {d.size} zeros dropped"
    hopeless = cannot_reject(attainable)
    return TestResult(min(up, down), p, attainable, d.size, exact, method, hopeless, 0, zeros)

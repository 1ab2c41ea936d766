"""stability(): do two seeds rank the heads alike?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.errors import TaskError
from kvprobe.heads.scanning import THRESHOLD, Trial, gather, top
from kvprobe.stats.bca import resample_weights
from kvprobe.stats.records import Record

Array = NDArray[np.float64]
METHOD = (
    "Spearman over layers × heads of the mean scores of two seeds; percentile bootstrap over grid cells, both seeds' "
    "trials of a cell drawn together. Means of resampled cells are noisier than means, so that resampled rho lie lower "
    "(`bias`, their mean − rho): the interval errs to the low side"
)


@dataclass(frozen=True)
class Stability(Record):
    """Agreement of two seeds.

    ``rho`` is NaN where a seed's scores are all the same; ``undefined`` counts resamples without one, which are left
    out of the interval. ``overlap`` is the share of the ``top_k`` heads that both seeds name, of those with a score
    above 0 (None where there are none).
    """

    rho: float
    ci_low: float
    ci_high: float
    bias: float
    n_cells: int
    n_heads: int
    n_kept: tuple[int, int]
    top_k: int
    overlap: float | None
    undefined: int
    resamples: int
    level: float
    seed: int
    method: str = METHOD


def stability(
    first: Sequence[Trial],
    second: Sequence[Trial],
    kind: str = "retrieval",
    *,
    threshold: float = THRESHOLD,
    k: int = 10,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = 1999,
) -> Stability:
    """Spearman's ρ over all heads between the mean scores of two seeds' trials, with its interval over cells.

    Parameters
    ----------
    first, second
        Trials of the same cells (length, depth, needle) with two seeds; only those that were answered count.

    Raises
    ------
    TaskError
        The trials are not of the same cells, or none of one seed was answered.
    """
    ours, theirs = _by_cell(first), _by_cell(second)
    if set(ours) != set(theirs) or len(ours) < len(first) or len(theirs) < len(second):
        raise TaskError(
            f"{len(first)} and {len(second)} trials of {len(set(ours) & set(theirs))} common cells: stability compares "
            "two seeds on the same lengths, depths and needles, one trial each"
        )
    means = [gather(trials, kind, threshold) for trials in (first, second)]
    rho = float(_spearman(*(mean.scores.reshape(1, -1) for mean in means))[0])
    weights = resample_weights(len(ours), seed, resamples)
    drawn = _spearman(*(_means(weights, [by[cell] for cell in ours], kind, threshold) for by in (ours, theirs)))
    drawn = drawn[np.isfinite(drawn)]
    usable = len(drawn) > 0 and len(ours) > 1 and math.isfinite(rho)
    tails = ((1 - level) / 2, (1 + level) / 2)
    low, high = np.quantile(drawn, tails) if usable else (math.nan, math.nan)
    named = [{(layer, head) for layer, head, score in top(mean.scores, k) if score > 0} for mean in means]
    most = max(map(len, named))
    return Stability(
        rho=rho,
        ci_low=float(low),
        ci_high=float(high),
        bias=float(drawn.mean() - rho) if usable else math.nan,
        n_cells=len(ours),
        n_heads=means[0].scores.size,
        n_kept=(means[0].n_kept, means[1].n_kept),
        top_k=k,
        overlap=len(named[0] & named[1]) / most if most else None,
        undefined=resamples - len(drawn),
        resamples=resamples,
        level=level,
        seed=seed,
    )


def _by_cell(trials: Sequence[Trial]) -> dict[tuple[int, float, int], Trial]:
    return {(each.cell.length, float(each.cell.depth), each.cell.needle): each for each in trials}


def _means(weights: Array, trials: Sequence[Trial], kind: str, threshold: float) -> Array:
    """Mean scores [R, L·H] of the kept trials of each resample; NaN where it holds none."""
    kept = np.array([each.kept(kind, threshold) for each in trials], dtype=float)
    scores = np.stack([getattr(each, kind).ravel() for each in trials])
    with np.errstate(invalid="ignore"):
        return np.asarray((weights * kept) @ scores / (weights @ kept)[:, None])


def _spearman(one: Array, other: Array) -> Array:
    """Spearman's ρ of each pair of rows, ties at their mean rank; NaN where a row is constant or not finite."""
    from scipy.stats import rankdata

    # Means of the same scores in another order differ in their last digits: rounded, ties stay ties.
    ranks = [rankdata(each.round(12), axis=1) - (each.shape[1] + 1) / 2 for each in (one, other)]
    with np.errstate(invalid="ignore"):
        covariance = (ranks[0] * ranks[1]).sum(1)
        return np.asarray(covariance / np.sqrt((ranks[0] ** 2).sum(1) * (ranks[1] ** 2).sum(1)))

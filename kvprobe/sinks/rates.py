"""Sink rates: how much of each head's attention the first position takes, and which heads are sinks by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvprobe.errors import TheoryError, quote
from kvprobe.sinks.buckets import FIRST
from kvprobe.sinks.checks import instance
from kvprobe.sinks.scores import Scores

if TYPE_CHECKING:
    import pandas as pd

THRESHOLD = 0.3
"""ε of Gu et al. (arXiv 2410.10781, section 3): a head is a sink where the first position's mean mass exceeds it."""


def sink_rates(scores: Scores, threshold: float = THRESHOLD) -> pd.DataFrame:
    """Mass on the first real position and on the first four, by head.

    Parameters
    ----------
    scores
        :class:`kvprobe.sinks.Scores`; its first real position is ``pad``.
    threshold
        A head is ``sinky`` where s_first > threshold.

    Returns
    -------
    DataFrame
        ``layer, head, first`` (s of the first position: in a layer with a window, over the rows that see it),
        ``first4`` (Σ s over the first four, or as many as there are), ``learned`` (mass of the model's own sink),
        ``sinky``. A first position that no chosen query sees, behind a window, has taken nothing: 0.

    Notes
    -----
    Gu et al., arXiv 2410.10781: Sink₁ = share of heads with s_1 > ε, ε = 0.3, over T = 64 tokens and all queries; it
    falls with T and differs for other query rows, so say which were used.
    """
    import pandas as pd

    _check(scores, threshold)
    taken = np.nan_to_num(scores.mass[..., scores.pad : scores.pad + FIRST])
    layer, head = (grid.reshape(-1) for grid in np.indices(taken.shape[:2]))
    first, first4 = taken[..., 0].reshape(-1), taken.sum(-1).reshape(-1)
    columns = {"layer": layer, "head": head, "first": first, "first4": first4, "learned": scores.learned.reshape(-1)}
    return pd.DataFrame(columns | {"sinky": first > threshold})


def share(scores: Scores, threshold: float = THRESHOLD) -> float:
    """Share of all heads whose mean mass on the first position exceeds the threshold (Gu et al.'s Sink₁)."""
    _check(scores, threshold)
    return float((np.nan_to_num(scores.mass[..., scores.pad]) > threshold).mean())


def _check(scores: Scores, threshold: float) -> None:
    instance(scores, Scores, "scores", "what sinks.scores returns")
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float, np.number)) or not 0 <= threshold <= 1:
        raise TheoryError(f"threshold={quote(threshold)}; allowed: a mass from 0 to 1")

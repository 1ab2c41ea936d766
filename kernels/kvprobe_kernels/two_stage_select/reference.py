"""Two-stage selection, one row at a time, by sorting Python numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def two_stage_select(
    scores: Tensor,
    norms: Tensor | None,
    protected: Tensor | None,
    first: list[int],
    budgets: list[int],
    epsilon: float,
) -> Tensor:
    """Keep ``budgets[r]`` entries of row r: ``first[r]`` by (-score, position), the rest by (-product, position).

    Parameters
    ----------
    scores, norms : Tensor, [R, n]
        Checked; -inf among the scores is no candidate. ``norms`` may be None: one stage.
    protected : bool Tensor, [R, n], optional
        Entries that come before all others.
    first, budgets : list of int
        Entries after stage 1 and after stage 2.
    epsilon : float
        Added to the score in stage 2.

    Returns
    -------
    Tensor, bool [R, n]
    """
    keep = torch.zeros(scores.shape, dtype=torch.bool)
    # The product is rounded as every backend rounds it; after that, Python compares exact values.
    products = None if norms is None else ((scores + epsilon) * norms).tolist()
    smallest = torch.finfo(scores.dtype).min
    for row, score in enumerate(scores.tolist()):
        marked = [False] * len(score) if protected is None else protected[row].tolist()
        left = [i for i in range(len(score)) if score[i] > -math.inf]
        left.sort(key=lambda i: (not marked[i], -score[i], i))
        places = budgets[row] if products is None else first[row]
        chosen, left = left[:places], left[places:]
        if products is not None:
            # A product that overflows downwards is still a candidate's, and ties with the smallest number.
            left.sort(key=lambda i: (-max(products[row][i], smallest), i))
            chosen += left[: budgets[row] - places]
        keep[row, chosen] = True
    return keep.to(scores.device)

"""Retrieval scores: how much of a needle each head copies into the answer."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvprobe.heads.trials import Decoded

Array = NDArray[np.float64]


def retrieval_scores(decoded: Decoded) -> Array:
    """Share of the needle that each head copies, [L, H].

    A head copies at step t if the key j* = argmax_j A_tj (the first of equals) lies in the span S and its token is the
    one that step t wrote:  score = Σ_t 1[j* ∈ S and x_{j*} = y_t] / |S|.  A learned sink is no key. Above 1 only where
    the needle is copied more than once. (Wu et al., arXiv 2404.15574.)
    """
    trace, (start, stop) = decoded.trace, decoded.span
    written, ids = torch.tensor(decoded.generated, dtype=torch.int64), trace.ids.cpu()
    scores = np.zeros((trace.n_layers, trace.n_heads))
    for view in trace.layers():
        top = view.attention[:, : len(written)].argmax(-1).cpu()  # torch promises the first of equals
        copied = (top >= start) & (top < stop) & (ids[top] == written)
        scores[view.index] = copied.sum(-1).double().numpy() / (stop - start)
    return scores

"""Retrieval-reasoning scores (R2): how much of a needle is among what each head attends to most while answering."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprobe.heads.trials import Decoded

Array = NDArray[np.float64]


def reasoning_scores(decoded: Decoded) -> Array:
    """Attention to the needle among each head's most attended positions, [L, H].

    With T = |S| tokens in the span and top_T(t) the T keys of largest A_t (of equals the first):
    score = Σ_t Σ_{j ∈ S ∩ top_T(t)} A_tj / T.  Nothing needs to be copied. A learned sink is no key. (HeadKV's R2, Fu
    et al., arXiv 2410.19258.)
    """
    trace, (start, stop) = decoded.trace, decoded.span
    steps, size = len(decoded.generated), stop - start
    scores = np.zeros((trace.n_layers, trace.n_heads))
    for view in trace.layers():
        attention = view.attention[:, :steps]
        inside = attention[..., start:stop] * _top(attention, size)[..., start:stop]
        scores[view.index] = inside.sum((1, 2), dtype=torch.float64).cpu().numpy() / size
    return scores


def _top(attention: Tensor, size: int) -> Tensor:
    """Boolean [H, T, n]: the ``size`` largest of each row, of equals the first (``topk`` leaves them unordered)."""
    least = attention.topk(size, dim=-1).values[..., -1:]
    above, equal = attention > least, attention == least
    room = size - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))

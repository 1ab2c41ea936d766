"""How far apart two computations of the same numbers may be, and how far they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

EXACT = 5e-4
"""Between two orders of summation in fp32: 6e-5 was seen on tiny models and on SmolLM2."""

ULPS = 16
"""Of the largest number in half precision: tiny models with sharp attention came 10 apart from transformers itself."""

ROUTED = ("experts", "moe", "router")
"""Words in the class names of modules that send each token to some experts only."""


def tolerance(reference: Tensor, dtype: torch.dtype) -> float:
    """5e-4 in fp32, 16 units in the last place of the largest number where those are more."""
    return max(EXACT, ULPS * torch.finfo(dtype).eps * float(reference.abs().max()))


def routes(model: Any) -> bool:
    """Whether tokens are sent to experts: a rounding error then flips a choice, and a token's numbers with it."""
    return any(word in type(module).__name__.lower() for module in model.modules() for word in ROUTED)


def largest(a: Tensor, b: Tensor) -> float:
    """max |a − b|, NaN where any is NaN."""
    return float((a.detach().float() - b.detach().float()).abs().max())


def typical(a: Tensor, b: Tensor) -> float:
    """The median over rows [..., n, ·] of the largest |a − b|; NaN where any is NaN.

    What is compared where rounding flips the choice of experts of some tokens: most rows still have to agree, and a
    model that mistakes its cache, a mask or a window of some tokens differs on all rows that come later.
    """
    difference = (a.detach().float() - b.detach().float()).abs()
    by_row = difference.flatten(0, -3).amax(0) if difference.dim() > 2 else difference
    return float(by_row.amax(-1).median())


def worst(values: Sequence[float]) -> float:
    """The largest, or NaN where any is NaN (the built-in ``max`` drops a NaN that does not come first)."""
    return float(torch.tensor(values).max())

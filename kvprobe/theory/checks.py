"""Domains of the formulas: one-line errors instead of silent broadcasting.

The annotations name the shapes once: ``n`` keys, ``d`` head width, ``D`` model width, ``*#b`` any leading dimensions
that broadcast.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.errors import TheoryError

Rows = Float[Tensor, "*#b n"]
Mask = Bool[Tensor, "*#b n"]
Values = Float[Tensor, "*#b n d"]
Projection = Float[Tensor, "*#b d D"]
PerRow = Float[Tensor, "*#b"]
Vectors = Float[Tensor, "*#b D"]

ROW_DTYPES = (torch.float32, torch.float64)


def check_rows(A: Tensor, name: str = "A") -> None:
    """Refuse anything but float32 or float64 rows: a 16-bit pattern has already lost its small remainders."""
    if A.ndim < 1:
        raise TheoryError(f"{name} is a scalar; an attention row needs the shape [..., n]")
    if A.dtype not in ROW_DTYPES:
        raise TheoryError(f"{name} is {A.dtype}; allowed: torch.float32, torch.float64 (softmax of fp32 logits)")


def check_mask(A: Tensor, mask: Tensor, name: str = "keep") -> None:
    """Refuse masks that are not boolean (0/1 floats, −inf biases) or that do not line up with the rows ``A``."""
    check_rows(A)
    if mask.dtype != torch.bool:
        raise TheoryError(f"{name} is {mask.dtype}; allowed: torch.bool")
    _check_rows_alike(A, mask, name)


def check_weights(A: Tensor, weights: Tensor) -> None:
    """Refuse fractional masks outside [0, 1], NaN included."""
    check_rows(A)
    _check_rows_alike(A, weights, "weights")
    if not bool(((weights >= 0) & (weights <= 1)).all()):
        raise TheoryError(f"weights span [{float(weights.min()):g}, {float(weights.max()):g}]; allowed: [0, 1]")


def check_per_key(A: Tensor, m: Tensor, name: str = "m") -> None:
    """Refuse per-key numbers that do not line up with the rows ``A``."""
    check_rows(A)
    _check_rows_alike(A, m, name)


def check_sink(A: Tensor, sink_mass: Tensor | None) -> None:
    """Refuse a learned-sink mass that is not one number a row."""
    if sink_mass is not None and not _broadcasts(A.shape[:-1], sink_mass.shape):
        raise TheoryError(
            f"sink_mass has the shape {list(sink_mass.shape)}; allowed: one number a row, {list(A.shape[:-1])}"
        )


def check_values(A: Tensor, V: Tensor) -> None:
    """Refuse values that are not ``[..., n, d]`` for the n keys of ``A``."""
    check_rows(A)
    if V.ndim < 2 or V.shape[-2] != A.shape[-1] or not _broadcasts(A.shape[:-1], V.shape[:-2]):
        raise TheoryError(f"V has the shape {list(V.shape)}; allowed with A {list(A.shape)}: [..., {A.shape[-1]}, d]")


def check_projection(X: Tensor, W_O: Tensor, name: str = "V") -> None:
    """Refuse an output projection whose rows are not the last dimension of ``X``."""
    if X.ndim < 1 or W_O.ndim < 2 or W_O.shape[-2] != X.shape[-1]:
        raise TheoryError(
            f"W_O has the shape {list(W_O.shape)}; allowed with {name} {list(X.shape)}: [..., {X.shape[-1]}, D]"
        )


def check_p(p: int) -> None:
    """Refuse every norm but the 1-norm and the 2-norm."""
    if isinstance(p, bool) or p not in (1, 2):
        raise TheoryError(f"p = {p!r}; allowed: 1, 2")


def check_retained(R: Tensor) -> None:
    """Refuse rows without retained mass, naming the first: they have no attention row (0 / 0)."""
    empty = R <= 0
    if bool(empty.any()):
        row = tuple(empty.nonzero()[0].tolist())
        raise TheoryError(
            f"row {row} of {tuple(R.shape)} retains no attention mass (R = 0) and has no learned sink; "
            "allowed: rows that keep a key of positive attention"
        )


def _check_rows_alike(A: Tensor, other: Tensor, name: str) -> None:
    alike = other.ndim >= 1 and other.shape[-1] == A.shape[-1] and _broadcasts(A.shape, other.shape)
    if not alike:
        raise TheoryError(
            f"{name} has the shape {list(other.shape)}; allowed with A {list(A.shape)}: [..., {A.shape[-1]}]"
        )


def _broadcasts(a: torch.Size, b: torch.Size) -> bool:
    return all(i == j or 1 in (i, j) for i, j in zip(reversed(a), reversed(b), strict=False))

"""p = 2 without a loop over D: a matrix L of at most d columns with ‖x W_O − c‖₂² = ‖x L − t‖² + r² for every x."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprobe_kernels.dispatch import KernelError

COPY_BYTES = 4 << 20
"""Bytes of W_O that are copied to float64 at a time."""


def narrow(W_O: Tensor, centre: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Narrow matrix, centre and remainder that give the same 2-norms as ``W_O`` and ``centre``, float64.

    Without a centre, L is the Cholesky factor of the Gram matrix G = W_O W_Oᵀ = L Lᵀ. ‖x L‖ is then rounded as ‖x W_O‖
    is, where the quadratic form √(x G xᵀ) in float32 would square the condition number. Where rounding leaves G not
    positive definite, L = U √max(Λ, 0) from its eigenvectors.

    With a centre, from W_Oᵀ = Q R: the part of c in the span of Q is t = c Q, the rest r = ‖c − t Qᵀ‖, and L = Rᵀ.
    Q has orthonormal columns whose span holds the rows of W_O at any rank, so no rank is decided and nothing is solved.

    Parameters
    ----------
    W_O : Tensor ``[H, d, D]``
        Output projection, one slice a query head.
    centre : Tensor ``[*B, H, D]`` or None
        The point that norms are measured from.

    Returns
    -------
    L : Tensor ``[H, d, min(d, D)]`` (``[H, d, d]`` without a centre)
        The narrow matrix.
    t : Tensor ``[*B, H, min(d, D)]`` or None
        The centre in its coordinates.
    r : Tensor ``[*B, H]`` or None
        The distance from the centre to the span.

    Raises
    ------
    KernelError
        W_O holds NaN or infinity.

    Notes
    -----
    Derived for kvprobe.
    """
    if centre is None:
        # A few heads at a time: one float64 product for them, and no float64 copy of a large matrix.
        parts = [_gram(part.double()) for part in W_O.split(max(1, COPY_BYTES // (8 * W_O[0].numel())))]
        return _gram_factor(parts[0] if len(parts) == 1 else torch.cat(parts)), None, None
    W = W_O.double()
    if not bool(W.isfinite().all()):
        raise _not_finite()
    Q, R = torch.linalg.qr(W.mT)
    c = centre.double().unsqueeze(-2)
    t = c @ Q
    rest = c - t @ Q.mT
    return R.mT, t.squeeze(-2), torch.linalg.vector_norm(rest.squeeze(-2), dim=-1)


def _gram(W: Tensor) -> Tensor:
    return torch.bmm(W, W.mT)


def _gram_factor(G: Tensor) -> Tensor:
    L, info = torch.linalg.cholesky_ex(G)
    indefinite = info != 0
    # Two flags in one tensor: one wait for the device.
    some, finite = torch.stack([indefinite.any(), G.isfinite().all()]).tolist()
    if not finite:
        raise _not_finite()
    if some:
        values, vectors = torch.linalg.eigh(G[indefinite])
        L[indefinite] = vectors * values.clamp_(min=0).sqrt_().unsqueeze(-2)
    return L


def _not_finite() -> KernelError:
    return KernelError("W_O holds NaN or infinity: p=2 factors it and needs finite numbers; p=1 takes any")

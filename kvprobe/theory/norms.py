"""Norms after the output projection, ‖x W_O‖_p, without ever holding all n × D projected values."""

from collections.abc import Iterator
from itertools import zip_longest
from math import ceil, prod

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.theory.checks import Projection, Rows, Values, check_p, check_projection

# A block of projected rows is written once and read back at once. On a CPU its share a thread should stay in the core's
# L2 cache; an accelerator wants few large launches.
CPU_THREAD_BLOCK_BYTES = 2 << 20
ACCELERATOR_BLOCK_BYTES = 256 << 20


def gram(W_O: Projection) -> Float[Tensor, "*#b d d"]:
    """Gram matrix G = W_O W_Oᵀ of one head's output projection, so that ‖x W_O‖₂² = x G xᵀ without a loop over D.

    Parameters
    ----------
    W_O : Tensor ``[..., d, D]``
        This query head's slice of the output projection.

    Returns
    -------
    Tensor ``[..., d, d]``
        G, float32 or float64: in 16 bits squares lose half of their digits, and those beyond 256 overflow.

    Notes
    -----
    Derived for kvprobe.
    """
    W_O = W_O.to(torch.promote_types(W_O.dtype, torch.float32))
    return W_O @ W_O.mT


def projected_norms(X: Values, W_O: Projection, p: int = 1) -> Rows:
    """Norm of each row after the output projection, ‖X_i W_O‖_p.

    p = 1 multiplies block by block; p = 2 takes the square root of x G xᵀ in float64, because the quadratic form
    squares the condition number, and clamps the negatives that rounding leaves.

    Parameters
    ----------
    X : Tensor ``[..., n, d]``
        Rows of head width; their dtype is that of the result.
    W_O : Tensor ``[..., d, D]``
        Output projection; leading dimensions broadcast.
    p : {1, 2}
        The norm.

    Returns
    -------
    Tensor ``[..., n]``
        The norms.

    Raises
    ------
    TheoryError
        p is neither 1 nor 2, or the widths differ.
    """
    check_p(p)
    check_projection(X, W_O, "X")
    if p == 2:
        return _two_norms(X, W_O)
    W_O = W_O.to(X.dtype)
    norms = [(X[..., rows, :] @ W_O).abs_().sum(-1) for rows in _blocks(X, W_O)]
    return norms[0] if len(norms) == 1 else torch.cat(norms, -1)


def value_norms(V: Values, W_O: Projection, p: int = 1) -> Rows:
    """Projected value norms m_i = ‖V_i W_O‖_p.

    Parameters
    ----------
    V : Tensor ``[..., n, d]``
        Values of the kv head that the query head reads (h // G). 16-bit values are taken to float32.
    W_O : Tensor ``[..., d, D]``
        The query head's slice of the output projection.
    p : {1, 2}
        The norm; CriticalKV uses 1.

    Returns
    -------
    Tensor ``[..., n]``
        m, float32 or float64.

    Raises
    ------
    TheoryError
        p is neither 1 nor 2, or the widths differ.

    Notes
    -----
    CriticalKV (Feng et al., arXiv 2502.03805), section 3.
    """
    dtype = torch.promote_types(torch.promote_types(V.dtype, W_O.dtype), torch.float32)
    return projected_norms(V.to(dtype), W_O, p)


def row_blocks(n_rows: int, bytes_per_row: int, device: torch.device) -> Iterator[slice]:
    """Slices of nearly equal length that cover ``n_rows`` (one empty slice for none), each of one block of memory."""
    on_cpu = device.type == "cpu"
    budget = CPU_THREAD_BLOCK_BYTES * torch.get_num_threads() if on_cpu else ACCELERATOR_BLOCK_BYTES
    n_blocks = max(1, ceil(n_rows * bytes_per_row / budget))
    step = max(1, ceil(n_rows / n_blocks))
    for start in range(0, max(1, n_rows), step):
        yield slice(start, start + step)


def _blocks(X: Tensor, W_O: Tensor) -> Iterator[slice]:
    leading = zip_longest(reversed(X.shape[:-2]), reversed(W_O.shape[:-2]), fillvalue=1)
    batch = prod(max(pair) for pair in leading)
    return row_blocks(X.shape[-2], max(1, batch * W_O.shape[-1] * X.element_size()), X.device)


def _two_norms(X: Tensor, W_O: Tensor) -> Tensor:
    G = gram(W_O.double())
    norms = []
    for rows in _blocks(X, G):
        x = X[..., rows, :].double()
        norms.append(((x @ G) * x).sum(-1).clamp_(min=0).sqrt_())
    return torch.cat(norms, -1).to(X.dtype)

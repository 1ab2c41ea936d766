"""The exact change of a head's (and a layer's) output under eviction or value gating, in forms that do not cancel."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.errors import TheoryError
from kvprobe.theory.attention import retained
from kvprobe.theory.checks import (
    Mask,
    PerRow,
    Projection,
    Rows,
    Values,
    Vectors,
    check_mask,
    check_p,
    check_projection,
    check_retained,
    check_values,
)


def perturbation_vector(A: Rows, V: Values, W_O: Projection, keep: Mask, sink_mass: PerRow | None = None) -> Vectors:
    """Exact change of one head's output, (z′ − z) W_O = (a_S z′ − u_S) W_O with z′ = u_N / R.

    Evicted mass times the distance of what remains from what was cut. z′ − z itself, and (a_S z − u_S) / R, cancel:
    the latter loses 5 % in float32 at R = 1e-6, this form is good to 1e-7 at R = 1e-12.

    Parameters
    ----------
    A : Tensor ``[..., n]``
        Attention rows, fp32 or fp64; 0 at invisible keys.
    V : Tensor ``[..., n, d]``
        Values of the kv head that the query head reads.
    W_O : Tensor ``[..., d, D]``
        The query head's slice of the output projection. V and W_O are taken to the dtype of A.
    keep : bool Tensor ``[..., n]``
        True = kept.
    sink_mass : Tensor ``[...]``, optional
        Mass of a learned sink (always kept, value 0).

    Returns
    -------
    Tensor ``[..., D]``
        o′ − o.

    Raises
    ------
    TheoryError
        Shapes or dtypes out of the domain, or a row with R = 0.

    Notes
    -----
    Derived for kvprobe.
    """
    return _project(head_shift(A, V, keep, sink_mass), W_O)


def perturbation(
    A: Rows, V: Values, W_O: Projection, keep: Mask, p: int = 1, sink_mass: PerRow | None = None
) -> PerRow:
    """Exact perturbation of one head, L(S) = ‖(z′ − z) W_O‖_p = ‖(a_S z′ − u_S) W_O‖_p.

    For a single key of weight a: o′ − o = a / (1 − a) · (o − 𝒱_i). Unchanged when one vector is added to all values
    (without a learned sink). Parameters, errors: :func:`perturbation_vector`; p is 1 or 2.

    Returns
    -------
    Tensor ``[...]``
        L.

    Notes
    -----
    Derived for kvprobe.
    """
    check_p(p)
    return norm(perturbation_vector(A, V, W_O, keep, sink_mass), p)


def value_gate_vector(A: Rows, V: Values, W_O: Projection, S: Mask, scale: float) -> Vectors:
    """Exact change of one head's output when the values on ``S`` are scaled, o′ − o = (c − 1) u_S W_O.

    Logits are untouched: A stays what it was, nothing is renormalised.

    Parameters
    ----------
    A, V, W_O
        As in :func:`perturbation_vector`.
    S : bool Tensor ``[..., n]``
        True = gated (the opposite sense of ``keep``).
    scale : float
        c; 0 silences the content, 1 changes nothing.

    Returns
    -------
    Tensor ``[..., D]``
        o′ − o.

    Raises
    ------
    TheoryError
        Shapes or dtypes out of the domain.

    Notes
    -----
    Derived for kvprobe.
    """
    check_mask(A, S, "S")
    check_values(A, V)
    return _project((scale - 1.0) * weighted_values(A * S, V), W_O)


def value_gate(A: Rows, V: Values, W_O: Projection, S: Mask, scale: float, p: int = 1) -> PerRow:
    """Perturbation by value gating, ‖(c − 1) u_S W_O‖_p. Parameters, errors: :func:`value_gate_vector`; p is 1 or 2."""
    check_p(p)
    return norm(value_gate_vector(A, V, W_O, S, scale), p)


def layer_perturbation(
    A: Float[Tensor, "*#b H n"],
    V: Float[Tensor, "*#b K n d"],
    W_O: Float[Tensor, "H d D"],
    keep: Bool[Tensor, "*#b #H n"],
    p: int = 1,
    sink_mass: Float[Tensor, "*#b #H"] | None = None,
) -> Float[Tensor, "*#b"]:
    """Exact perturbation of a layer's attention output, ‖Σ_h (z′ − z)_h W_O^h‖_p; at most Σ_h L_h.

    Parameters
    ----------
    A : Tensor ``[..., H, n]``
        Attention rows of all query heads.
    V : Tensor ``[..., K, n, d]``
        Values of the kv heads; query head h reads h // (H // K).
    W_O : Tensor ``[H, d, D]``
        Output projection by query head.
    keep : bool Tensor ``[..., H, n]`` or ``[..., 1, n]``
        True = kept.
    p : {1, 2}
        The norm.
    sink_mass : Tensor ``[..., H]``, optional
        Mass of each head's learned sink.

    Returns
    -------
    Tensor ``[...]``
        L of the layer.

    Raises
    ------
    TheoryError
        As :func:`perturbation`; or K does not divide H.

    Notes
    -----
    Derived for kvprobe.
    """
    check_p(p)
    per_head = perturbation_vector(A, per_query_head(V, A.shape[-2]), W_O, keep, sink_mass)
    return norm(per_head.sum(-2), p)


def per_query_head(V: Float[Tensor, "*b K n d"], n_heads: int) -> Float[Tensor, "*b H n d"]:
    """Values as each query head reads them, ``[..., H, n, d]``: head h takes kv head h // (H // K)."""
    if V.ndim < 3 or n_heads % V.shape[-3]:
        raise TheoryError(f"V has the shape {list(V.shape)}; allowed with {n_heads} query heads: [..., K, n, d], K | H")
    return V.repeat_interleave(n_heads // V.shape[-3], dim=-3)


def head_shift(A: Tensor, V: Tensor, keep: Tensor, sink_mass: Tensor | None = None) -> Tensor:
    """z′ − z = a_S z′ − u_S, before the output projection, ``[..., d]``."""
    a_S = retained(A, ~keep)
    return a_S.unsqueeze(-1) * kept_output(A, V, keep, sink_mass) - weighted_values(A * ~keep, V)


def kept_output(A: Tensor, V: Tensor, keep: Tensor, sink_mass: Tensor | None = None) -> Tensor:
    """z′ = u_N / R, the head output of the survivors, ``[..., d]``."""
    check_values(A, V)
    R = retained(A, keep, sink_mass)
    check_retained(R)
    return weighted_values(A * keep, V) / R.unsqueeze(-1)


def weighted_values(weights: Tensor, V: Tensor) -> Tensor:
    """Σ_i weights_i V_i, ``[..., d]``, in the dtype of the weights."""
    return (weights.unsqueeze(-2) @ V.to(weights.dtype)).squeeze(-2)


def norm(x: Tensor, p: int) -> Tensor:
    """‖x‖_p over the last dimension (abs().sum() is 2× faster than ``vector_norm`` for p = 1).

    Squares are summed in float64: those of a shift below 1e-22 would underflow in float32, and its norm would be 0.
    """
    return x.abs().sum(-1) if p == 1 else torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).to(x.dtype)


def _project(x: Tensor, W_O: Tensor) -> Tensor:
    check_projection(x, W_O, "z")
    return (x.unsqueeze(-2) @ W_O.to(x.dtype)).squeeze(-2)

"""Upper bounds of the perturbation as functions of what is evicted: θ, θ_c, θ̂ and the relaxed bound."""

from typing import Literal

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
    check_mask,
    check_p,
    check_per_key,
    check_retained,
)
from kvprobe.theory.norms import projected_norms
from kvprobe.theory.perturbation import kept_output


def value_mass(A: Rows, m: Rows, keep: Mask) -> PerRow:
    """Evicted value mass w_S = Σ_S A m.

    A column of its own: θ is not a function of w_S (sets of equal w_S can differ in θ by a factor).

    Parameters
    ----------
    A : Tensor ``[..., n]``
        Attention rows, fp32 or fp64; 0 at invisible keys.
    m : Tensor ``[..., n]``
        Projected value norms, from :func:`kvprobe.theory.value_norms`.
    keep : bool Tensor ``[..., n]``
        True = kept; S is what is not.

    Returns
    -------
    Tensor ``[...]``
        w_S.
    """
    check_mask(A, keep)
    check_per_key(A, m)
    return (A * m * ~keep).sum(-1)


def bound(A: Rows, m: Rows, keep: Mask, sink_mass: PerRow | None = None) -> PerRow:
    """Upper bound of the perturbation, θ(S) = w_S + (a_S / R) w_N.

    Equal to C − (2 − 1/R) Σ N A m, without its cancellation.

    Parameters
    ----------
    A, m, keep
        As in :func:`value_mass`.
    sink_mass : Tensor ``[...]``, optional
        Mass of a learned sink (always kept, m = 0).

    Returns
    -------
    Tensor ``[...]``
        θ, in units of m.

    Raises
    ------
    TheoryError
        Shapes or dtypes out of the domain, or a row with R = 0.

    Notes
    -----
    CriticalKV (Feng et al., arXiv 2502.03805), Theorem 3.3; the stable form is derived for kvprobe.
    """
    R = retained(A, keep, sink_mass)
    check_retained(R)
    # w_N / R is at most the largest m; a_S / R overflows where R is subnormal.
    return value_mass(A, m, keep) + retained(A, ~keep) * (value_mass(A, m, ~keep) / R)


def centred_bound(
    A: Rows, V: Values, W_O: Projection, keep: Mask, p: int = 1, sink_mass: PerRow | None = None
) -> PerRow:
    """Centred bound θ_c(S) = Σ_S A_i ‖o′ − 𝒱_i‖_p, always between L and θ, and equal to L for a single key.

    Parameters
    ----------
    A, V, W_O, keep, p, sink_mass
        As in :func:`kvprobe.theory.perturbation`.

    Returns
    -------
    Tensor ``[...]``
        θ_c.

    Raises
    ------
    TheoryError
        Shapes or dtypes out of the domain, or a row with R = 0.

    Notes
    -----
    Derived for kvprobe: (z′ − z) W_O = Σ_S A_i (o′ − 𝒱_i), and ‖o′‖ ≤ w_N / R. The values are centred before they are
    projected, so that 𝒱 is not formed and little is lost when they resemble each other.
    """
    check_p(p)
    centre = kept_output(A, V, keep, sink_mass)
    distances = projected_norms(V.to(A.dtype) - centre.unsqueeze(-2), W_O, p)
    return (A * ~keep * distances).sum(-1)


def stage2_bound(A: Rows, m: Rows, stage1: Mask, keep: Mask, sink_mass: PerRow | None = None) -> PerRow:
    """Bound that stage 2 of Algorithm 1 minimises, θ̂ = C′ − (2 − 1/σ) Σ N″ A m, C′ = C − (2 − 1/σ) Σ N′ A m.

    θ ≤ θ̂, because σ ≤ R. Computed as w_S + (mass outside stage 1 / σ) · w_N.

    Parameters
    ----------
    A, m, sink_mass
        As in :func:`bound`.
    stage1 : bool Tensor ``[..., n]``
        N′, the stage-1 keep set (window included); a subset of ``keep``.
    keep : bool Tensor ``[..., n]``
        N′ + N″, all that is kept.

    Returns
    -------
    Tensor ``[...]``
        θ̂, and NaN where σ ≤ ½: there the coefficient is not positive, the top of A m is the worst choice for stage 2,
        and such heads are counted and left out of averages. σ is ``retained(A, stage1, sink_mass)``, the sink included.

    Raises
    ------
    TheoryError
        Shapes or dtypes out of the domain, or a stage-1 key that is not kept.

    Notes
    -----
    CriticalKV, Theorem 3.5.
    """
    sigma = _stage1_mass(A, stage1, keep, sink_mass)
    inflation = retained(A, ~stage1) / sigma
    theta = value_mass(A, m, keep) + inflation * value_mass(A, m, ~keep)
    return torch.where(sigma > 0.5, theta, torch.nan)


def relaxed_bound(
    A: Rows,
    m: Rows,
    stage1: Mask,
    keep: Mask,
    sink_mass: PerRow | None = None,
    over: Literal["visible", "candidates"] = "visible",
) -> PerRow:
    """Relaxed bound of attention-only selection, C′ − M (2 − 1/σ) Σ N″ A with M = min m; at least θ̂.

    Parameters
    ----------
    A, m, stage1, keep, sink_mass
        As in :func:`stage2_bound`.
    over : {"visible", "candidates"}
        Keys that M is the minimum over: all with A > 0, as in the paper, or only those outside stage 1, which is
        tighter where a first token of tiny value norm is always in stage 1. Both ignore keys of no attention, whose
        norms no sum contains.

    Returns
    -------
    Tensor ``[...]``
        The relaxed bound, and NaN where σ ≤ ½, as in :func:`stage2_bound`.

    Raises
    ------
    TheoryError
        Shapes or dtypes out of the domain, a stage-1 key that is not kept, or an unknown ``over``.

    Notes
    -----
    CriticalKV, Theorem C.1. Computed as θ̂ + (2 − 1/σ) Σ N″ A (m − M), a sum of terms that are not negative.
    """
    if over not in ("visible", "candidates"):
        raise TheoryError(f"over = {over!r}; allowed: 'visible', 'candidates'")
    sigma = _stage1_mass(A, stage1, keep, sink_mass)
    eligible = (A > 0) & (~stage1 if over == "candidates" else True)
    least = torch.where(eligible, m, torch.inf).amin(-1, keepdim=True)
    stage2 = eligible & keep & ~stage1
    gap = (A * torch.where(stage2, m - least, 0.0)).sum(-1)
    return stage2_bound(A, m, stage1, keep, sink_mass) + (2.0 - 1.0 / sigma) * gap


def layer_bound(
    A: Float[Tensor, "*#b H n"],
    m: Float[Tensor, "*#b H n"],
    keep: Bool[Tensor, "*#b #H n"],
    sink_mass: Float[Tensor, "*#b #H"] | None = None,
) -> Float[Tensor, "*#b"]:
    """Bound of a layer's perturbation, Σ_h θ_h ≥ Σ_h L_h ≥ L_layer, for ``[..., H, n]``; else as :func:`bound`."""
    return bound(A, m, keep, sink_mass).sum(-1)


def _stage1_mass(A: Tensor, stage1: Tensor, keep: Tensor, sink_mass: Tensor | None) -> Tensor:
    sigma = retained(A, stage1, sink_mass)
    check_mask(A, keep)
    stray = stage1 & ~keep
    if bool(stray.any()):
        raise TheoryError(f"stage1 holds key {stray.nonzero()[0].tolist()}, which keep evicts; allowed: stage1 ⊆ keep")
    return sigma

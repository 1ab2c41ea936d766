"""Graded masks: how a finite bias −β on the logits of a span scales its effect."""

import torch
from torch import Tensor

from kvprobe.errors import TheoryError
from kvprobe.theory.checks import PerRow, Rows, check_per_key


def fractional_bound(A: Rows, A_prime: Rows, m: Rows) -> PerRow:
    """Upper bound under any reweighting, θ = Σ |A_i − A′_i| m_i.

    For a binary mask it equals :func:`kvprobe.theory.bound`, whose closed form holds for those alone.

    Parameters
    ----------
    A, A_prime : Tensor ``[..., n]``
        Attention rows before and after.
    m : Tensor ``[..., n]``
        Projected value norms.

    Returns
    -------
    Tensor ``[...]``
        θ.

    Notes
    -----
    Derived for kvprobe: the triangle inequality that Theorem 3.3 of CriticalKV (Feng et al., arXiv 2502.03805) closes.
    """
    check_per_key(A, A_prime, "A_prime")
    check_per_key(A, m)
    return ((A - A_prime).abs() * m).sum(-1)


def kappa(beta: Tensor | float, a_S: Tensor | float, retained: Tensor | float | None = None) -> Tensor:
    """Share of the full effect that a bias −β on S has, κ = (1 − e^{−β}) R / (R + a_S e^{−β}) with R = 1 − a_S.

    L_β / L_∞ = θ_β / θ_∞ = κ for one β on all of S and clean logits. Monotone in β, from 0 at 0 to 1 at infinity.

    Parameters
    ----------
    beta : Tensor or float
        β ≥ 0, in nats; infinity is eviction.
    a_S : Tensor or float
        Mass of S, in [0, 1).
    retained : Tensor or float, optional
        R as a sum over kept keys; give it where a_S ≈ 1 and 1 − a_S would cancel.

    Returns
    -------
    Tensor
        κ, in [0, 1].

    Raises
    ------
    TheoryError
        β < 0, a_S outside [0, 1), or R ≤ 0.

    Notes
    -----
    Derived for kvprobe. Half of the effect needs β = ln(1 + 1/R): for a_S ≈ 1, more than ln(a_S / R).
    """
    beta, a_S, R = _dose_arguments(beta, a_S, retained)
    if bool((~(beta >= 0)).any()):
        raise TheoryError(f"beta = {float(beta.min()):g}; allowed: beta >= 0")
    return -torch.expm1(-beta) * R / (R + a_S * torch.exp(-beta))


def kappa_inverse(kappa: Tensor | float, a_S: Tensor | float, retained: Tensor | float | None = None) -> Tensor:
    """The bias that has the share κ of the full effect, β = ln(1 + κ a_S / R) − ln(1 − κ).

    Doses on a κ grid are comparable between heads; doses on a β grid are not.

    Parameters
    ----------
    kappa : Tensor or float
        κ in [0, 1].
    a_S, retained
        As in :func:`kappa`.

    Returns
    -------
    Tensor
        β ≥ 0; infinity at κ = 1.

    Raises
    ------
    TheoryError
        κ outside [0, 1], a_S outside [0, 1), or R ≤ 0.

    Notes
    -----
    Derived for kvprobe.
    """
    share, a_S, R = _dose_arguments(kappa, a_S, retained)
    if bool((~((share >= 0) & (share <= 1))).any()):
        raise TheoryError(f"kappa spans [{float(share.min()):g}, {float(share.max()):g}]; allowed: [0, 1]")
    return torch.log1p(share * a_S / R) - torch.log1p(-share)


def _dose_arguments(
    first: Tensor | float, a_S: Tensor | float, retained: Tensor | float | None
) -> tuple[Tensor, Tensor, Tensor]:
    mass = _number(a_S)
    R = 1.0 - mass if retained is None else _number(retained)
    if bool((~((mass >= 0) & (R > 0))).any()):
        raise TheoryError(f"a_S = {float(mass.max()):g}, R = {float(R.min()):g}; allowed: 0 <= a_S < 1, R > 0")
    return _number(first), mass, R


def _number(x: Tensor | float) -> Tensor:
    """As a tensor of float32 at least: 1 − e^{−β} of a small β has no digits in 16 bits."""
    if not isinstance(x, Tensor):
        return torch.tensor(x, dtype=torch.float64)
    return x.to(torch.promote_types(x.dtype, torch.float32))

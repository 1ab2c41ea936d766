"""What a mask does to an attention row: renormalisation, its correction, and exact splits of the change."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.errors import TheoryError
from kvprobe.theory.checks import (
    Mask,
    PerRow,
    Rows,
    check_mask,
    check_per_key,
    check_retained,
    check_rows,
    check_sink,
    check_weights,
)


@dataclass(frozen=True)
class OwnSplit:
    """A′ − A_clean, split with the intervened run's own unmasked row as the reference; each part ``[..., n]``."""

    arithmetic: Tensor
    mechanism: Tensor
    removal: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of the parts, A′ − A_clean."""
        return self.arithmetic + self.mechanism + self.removal


@dataclass(frozen=True)
class ConditionalSplit:
    """A′ − A_clean, split by shares among the surviving keys; each part ``[..., n]``."""

    shares: Tensor
    arithmetic: Tensor
    removal: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of the parts, A′ − A_clean."""
        return self.shares + self.arithmetic + self.removal


def attention(logits: Rows, sink: Float[Tensor, "*#b"] | None = None) -> tuple[Rows, PerRow | None]:
    """Attention rows A = softmax(s) over the visible keys, with an optional learned sink in the denominator.

    Parameters
    ----------
    logits : Tensor ``[..., n]``
        fp32 or fp64, after scale and soft-cap; −inf at invisible keys.
    sink : Tensor ``[...]``, optional
        Learned sink logit of each row: one more key with value 0.

    Returns
    -------
    (Tensor ``[..., n]``, Tensor ``[...]`` or None)
        A, and the mass of the learned sink. A row that sees no key at all is 0, not NaN.
    """
    check_rows(logits, "logits")
    check_sink(logits, sink)
    top = logits.amax(-1) if sink is None else torch.maximum(logits.amax(-1), sink)
    top = torch.where(top.isneginf(), 0.0, top)
    weights = (logits - top.unsqueeze(-1)).exp()
    if sink is None:
        total = weights.sum(-1)
        return weights / torch.where(total == 0, 1.0, total).unsqueeze(-1), None
    sink_weight = (sink - top).exp()
    total = weights.sum(-1) + sink_weight
    return weights / total.unsqueeze(-1), sink_weight / total


def retained(A: Rows, keep: Mask, sink_mass: PerRow | None = None) -> PerRow:
    """Retained mass R = Σ_kept A + a_sink, as a sum over what is kept.

    1 − a_S would cancel: beside a sink of 0.9998 it keeps no digit of an R of 1e-12.

    Parameters
    ----------
    A : Tensor ``[..., n]``
        Attention rows, fp32 or fp64; 0 at invisible keys.
    keep : bool Tensor ``[..., n]``
        True = kept.
    sink_mass : Tensor ``[...]``, optional
        Mass of a learned sink, a key that is always kept and has the value 0.

    Returns
    -------
    Tensor ``[...]``
        R in [0, 1]. With a stage-1 set as ``keep`` this is its mass σ.
    """
    check_mask(A, keep)
    check_sink(A, sink_mass)
    return _with_sink((A * keep).sum(-1), sink_mass)


def renormalise(A: Rows, keep: Mask, sink_mass: PerRow | None = None) -> Rows:
    """Attention after eviction, A′ = N ⊙ A / R: every survivor is amplified by 1 / R.

    Equal to the softmax of the same logits with −inf on the evicted keys.

    Parameters
    ----------
    A, keep, sink_mass
        As in :func:`retained`.

    Returns
    -------
    Tensor ``[..., n]``
        A′. Where only a learned sink is left, A′ is 0 on every key.

    Raises
    ------
    TheoryError
        A row keeps no mass (R = 0); the message names it.

    Notes
    -----
    CriticalKV (Feng et al., arXiv 2502.03805), Theorem 3.2.
    """
    R = retained(A, keep, sink_mass)
    check_retained(R)
    return A * keep / R.unsqueeze(-1)


def renormalise_soft(A: Rows, weights: Rows, sink_mass: PerRow | None = None) -> Rows:
    """Attention under fractional masks, A′ = N ⊙ A / Σ N A with N in [0, 1].

    A finite bias −β on a logit is N = e^{−β}.

    Parameters
    ----------
    A, sink_mass
        As in :func:`retained`.
    weights : Tensor ``[..., n]``
        N, between 0 (evicted) and 1 (untouched).

    Returns
    -------
    Tensor ``[..., n]``
        A′.

    Raises
    ------
    TheoryError
        Weights outside [0, 1], or a row without any mass left.

    Notes
    -----
    Derived for kvprobe; Theorem 3.2 of CriticalKV is the case N ∈ {0, 1}.
    """
    check_weights(A, weights)
    check_sink(A, sink_mass)
    weighted = A * weights
    R = _with_sink(weighted.sum(-1), sink_mass)
    check_retained(R)
    return weighted / R.unsqueeze(-1)


def correct(A_masked: Rows, retained: PerRow) -> Rows:
    """Corrected attention Ã′ = A′ · R, free of the arithmetic amplification.

    With R of the intervened run's own unmasked row A⁺ (``reference="own"``) this is N ⊙ A⁺; with R of the clean run it
    is the literal reading of the paper (``reference="clean"``). Without a mask R = 1 and nothing changes.

    Parameters
    ----------
    A_masked : Tensor ``[..., n]``
        A′, the attention row of the masked run.
    retained : Tensor ``[...]``
        R of the reference row, from :func:`retained`.

    Returns
    -------
    Tensor ``[..., n]``
        Ã′.

    Notes
    -----
    Derived for kvprobe from Theorem 3.2 of CriticalKV.
    """
    check_rows(A_masked, "A_masked")
    check_sink(A_masked, retained)
    return A_masked * retained.unsqueeze(-1)


def conditional(A_clean: Rows, keep: Mask, sink_mass: PerRow | None = None) -> Rows:
    """Shares among the survivors of a clean row, N ⊙ A_clean / R_clean (a learned sink survives).

    The row that the mask alone would give, with logits that react to nothing; the reference of
    :func:`split_conditional`. Parameters, errors: as :func:`renormalise`, which it equals.
    """
    return renormalise(A_clean, keep, sink_mass)


def split_own(A_masked: Rows, A_plus: Rows, A_clean: Rows, keep: Mask) -> OwnSplit:
    """Exact split of the change of attention by the run's own unmasked row A⁺.

    A′ − A_clean = (A′ − N⊙A⁺) [arithmetic] + N⊙(A⁺ − A_clean) [mechanism] − (1−N)⊙A_clean [removal].

    Parameters
    ----------
    A_masked : Tensor ``[..., n]``
        A′, the masked run's row: 0 on evicted keys.
    A_plus : Tensor ``[..., n]``
        A⁺, softmax of the masked run's logits before its mask. At the first masked layer it is the clean row.
    A_clean : Tensor ``[..., n]``
        The clean run's row.
    keep : bool Tensor ``[..., n]``
        True = kept.

    Returns
    -------
    OwnSplit
        Parts that add up to A′ − A_clean.

    Raises
    ------
    TheoryError
        A′ has weight on an evicted key: the mask did not take.

    Notes
    -----
    Derived for kvprobe. N⊙A⁺ contains logits that the masked run never used: report :func:`split_conditional` too.
    """
    _check_split(A_masked, A_clean, keep)
    check_per_key(A_clean, A_plus, "A_plus")
    return OwnSplit(
        arithmetic=A_masked - A_plus * keep,
        mechanism=(A_plus - A_clean) * keep,
        removal=-(A_clean * ~keep),
    )


def split_conditional(A_masked: Rows, A_clean: Rows, keep: Mask, sink_mass: PerRow | None = None) -> ConditionalSplit:
    """Exact split of the change of attention by shares among survivors.

    A′ − A_clean = (A′ − N⊙A_clean/R) [shares] + N⊙A_clean (1/R − 1) [arithmetic] − (1−N)⊙A_clean [removal], with R the
    retained mass of the clean row.

    Parameters
    ----------
    A_masked, A_clean, keep
        As in :func:`split_own`.
    sink_mass : Tensor ``[...]``, optional
        Mass of a learned sink in the clean row.

    Returns
    -------
    ConditionalSplit
        Parts that add up to A′ − A_clean.

    Raises
    ------
    TheoryError
        A′ has weight on an evicted key, or the clean row retains no mass.

    Notes
    -----
    Derived for kvprobe. N⊙A_clean (1/R − 1) is computed as (N⊙A_clean / R) a_S: a_S / R overflows at a subnormal R.
    """
    _check_split(A_masked, A_clean, keep)
    shares = conditional(A_clean, keep, sink_mass)
    return ConditionalSplit(
        shares=A_masked - shares,
        arithmetic=shares * retained(A_clean, ~keep).unsqueeze(-1),
        removal=-(A_clean * ~keep),
    )


def _check_split(A_masked: Tensor, A_clean: Tensor, keep: Tensor) -> None:
    check_mask(A_clean, keep)
    check_per_key(A_clean, A_masked, "A_masked")
    leak = (A_masked * ~keep).abs().amax()
    if bool(leak > 0):
        raise TheoryError(f"A_masked has weight {float(leak):g} on an evicted key; allowed: exactly 0")


def _with_sink(mass: Tensor, sink_mass: Tensor | None) -> Tensor:
    return mass if sink_mass is None else mass + sink_mass.to(mass.dtype)

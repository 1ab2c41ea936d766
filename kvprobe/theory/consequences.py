"""What evicting many sets from one layer would do: L, θ, θ_c, θ̂ and the relaxed bound of all heads, in one sweep."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.errors import TheoryError
from kvprobe.theory.checks import check_p, check_retained
from kvprobe.theory.norms import row_blocks
from kvprobe.theory.perturbation import norm

PerSet = Float[Tensor, "S H"]


@dataclass(frozen=True)
class Consequences:
    """Measures of S kept sets on H heads of one layer, float64.

    Attributes
    ----------
    mass, retained
        [S, H] evicted mass a_S and retained mass R (a learned sink included).
    value_mass
        [S, H] w_S = Σ_S A m.
    perturbation, centred_bound, bound
        [S, H] L ≤ θ_c ≤ θ.
    layer_perturbation
        [S] ‖Σ_h Δz_h W_O^h‖_p ≤ Σ_h L_h.
    sigma, stage2_bound, relaxed_bound, relaxed_candidates
        [S, H] mass of the first-stage set; θ̂ and the relaxed bound, NaN where σ ≤ ½, the latter with M over all visible
        keys and over those outside stage 1. None without ``stage1``.
    """

    mass: PerSet
    retained: PerSet
    value_mass: PerSet
    perturbation: PerSet
    centred_bound: PerSet
    bound: PerSet
    layer_perturbation: Float[Tensor, " S"]
    sigma: PerSet | None = None
    stage2_bound: PerSet | None = None
    relaxed_bound: PerSet | None = None
    relaxed_candidates: PerSet | None = None


@torch.no_grad()
def consequences(
    A: Float[Tensor, "H n"],
    V: Float[Tensor, "K n d"],
    W_O: Float[Tensor, "H d D"],
    keep: Bool[Tensor, "S J n"],
    *,
    stage1: Bool[Tensor, "S J n"] | None = None,
    p: int = 1,
    sink_mass: Float[Tensor, " H"] | None = None,
) -> Consequences:
    """Everything the theory says about keeping each of S sets in one layer, for one attention row a head.

    The same as :func:`kvprobe.theory.perturbation`, ``centred_bound``, ``bound``, ``stage2_bound`` and
    ``relaxed_bound`` set by set, at the price of one projection: with m_i = ‖𝒱_i − 0‖ and θ_c = Σ_S A_i ‖𝒱_i − o′‖,
    every norm is a distance from a projected value to one of S + 1 centres. Works in float64 whatever comes in, so that
    L ≤ θ_c ≤ θ is not lost to rounding; holds one head's block of projected values at a time, never all n × D.

    Parameters
    ----------
    A : Tensor ``[H, n]``
        Attention row of each query head; 0 at invisible keys.
    V : Tensor ``[K, n, d]``
        Values of the kv heads; query head h reads h // (H // K).
    W_O : Tensor ``[H, d, D]``
        Output projection by query head.
    keep : bool Tensor ``[S, J, n]``
        True = kept; J is H, K, or 1 for all heads alike.
    stage1 : bool Tensor ``[S, J, n]``, optional
        N′ of each set, a subset of ``keep``.
    p : {1, 2}
        The norm.
    sink_mass : Tensor ``[H]``, optional
        Mass of each head's learned sink (always kept, value 0).

    Returns
    -------
    Consequences
        Arrays ``[S, H]``.

    Raises
    ------
    TheoryError
        Shapes or dtypes out of the domain, a first-stage key that is not kept, or a head with R = 0.

    Notes
    -----
    CriticalKV (Feng et al., arXiv 2502.03805), Theorems 3.3, 3.5 and C.1; L and θ_c are derived for kvprobe.
    """
    _check(A, V, W_O, keep, stage1, p, sink_mass)
    heads, delta = [], torch.zeros(len(keep), W_O.shape[-1], dtype=torch.float64, device=A.device)
    for h in range(len(A)):
        mine = _Head(
            A[h].double(),
            V[h // (len(A) // len(V))].double(),
            W_O[h].double(),
            _of_head(keep, h, len(A)),
            None if stage1 is None else _of_head(stage1, h, len(A)),
            0.0 if sink_mass is None else float(sink_mass[h]),
        )
        try:
            found, shift = mine.measure(p)
        except TheoryError as error:  # R = 0
            raise TheoryError(f"head {h}: {error}") from None
        delta += shift
        heads.append(found)
    columns = {name: torch.stack([head[name] for head in heads], 1) for name in heads[0]}
    return Consequences(layer_perturbation=norm(delta, p), **columns)


@dataclass(frozen=True)
class _Head:
    """One query head: its row [n], values [n, d], projection [d, D] and kept sets [S, n]."""

    A: Tensor
    V: Tensor
    W_O: Tensor
    keep: Tensor
    stage1: Tensor | None
    sink: float

    def measure(self, p: int) -> tuple[dict[str, Tensor], Tensor]:
        """Columns [S], and Δz W_O [S, D]."""
        kept, lost = self.A * self.keep, self.A * ~self.keep
        mass, R = lost.sum(-1), kept.sum(-1) + self.sink
        check_retained(R)
        z = kept @ self.V / R[:, None]
        shift = (mass[:, None] * z - lost @ self.V) @ self.W_O
        distances, m = self._distances(z, p)
        w_S, w_N = lost @ m, kept @ m
        found = {
            "mass": mass,
            "retained": R,
            "value_mass": w_S,
            "perturbation": norm(shift, p),
            "centred_bound": (lost * distances).sum(-1),
            "bound": w_S + mass * (w_N / R),  # mass / R overflows where R is subnormal
        }
        return found | ({} if self.stage1 is None else self._stages(m, w_S, w_N)), shift

    def _distances(self, z: Tensor, p: int) -> tuple[Tensor, Tensor]:
        """‖𝒱_i − z_s W_O‖_p [S, n] and m_i [n]: distances to each centre and to the origin."""
        # ‖x W_O‖₂ = ‖x Rᵀ‖₂ for W_Oᵀ = Q R: d numbers a key in place of D.
        basis = self.W_O if p == 1 else torch.linalg.qr(self.W_O.T, mode="r").R.T
        centres = torch.cat([z, torch.zeros_like(z[:1])]) @ basis
        exact = {"compute_mode": "donot_use_mm_for_euclid_dist"}
        width = 8 * (basis.shape[1] + len(centres))
        blocks = [
            torch.cdist(centres, self.V[rows] @ basis, p=float(p), **exact)
            for rows in row_blocks(len(self.V), width, self.V.device)
        ]
        every = torch.cat(blocks, 1)
        return every[:-1], every[-1]

    def _stages(self, m: Tensor, w_S: Tensor, w_N: Tensor) -> dict[str, Tensor]:
        """σ, θ̂ = w_S + (mass outside stage 1 / σ) w_N, and the relaxed bound θ̂ + (2 − 1/σ) Σ N″ A (m − M)."""
        assert self.stage1 is not None
        sigma = (self.A * self.stage1).sum(-1) + self.sink
        valid = sigma > 0.5
        theta = w_S + (self.A * ~self.stage1).sum(-1) / sigma * w_N
        relaxed = []
        for candidates in (self.A > 0, (self.A > 0) & ~self.stage1):
            least = torch.where(candidates, m, torch.inf).expand_as(self.keep).amin(-1, keepdim=True)
            stage2 = self.keep & ~self.stage1 & (self.A > 0)
            gap = (self.A * torch.where(stage2, m - least, 0.0)).sum(-1)
            relaxed.append(torch.where(valid, theta + (2 - 1 / sigma) * gap, torch.nan))
        return {
            "sigma": sigma,
            "stage2_bound": torch.where(valid, theta, torch.nan),
            "relaxed_bound": relaxed[0],
            "relaxed_candidates": relaxed[1],
        }


def _of_head(sets: Tensor, head: int, n_heads: int) -> Tensor:
    return sets[:, head // (n_heads // sets.shape[1])]


def _check(
    A: Tensor,
    V: Tensor,
    W_O: Tensor,
    keep: Tensor,
    stage1: Tensor | None,
    p: int,
    sink_mass: Tensor | None,
) -> None:
    check_p(p)
    H, n = A.shape if A.ndim == 2 else (0, 0)
    fits = (
        A.dtype in (torch.float32, torch.float64)
        and V.ndim == 3
        and V.shape[1] == n
        and H
        and len(V)
        and not H % len(V)
        and tuple(W_O.shape[:2]) == (H, V.shape[-1])
        and W_O.ndim == 3
        and (sink_mass is None or tuple(sink_mass.shape) == (H,))
    )
    if not fits:
        shown = ", ".join(f"{name} {list(x.shape)}" for name, x in (("A", A), ("V", V), ("W_O", W_O)))
        raise TheoryError(
            f"{shown}, A {A.dtype}; allowed: A [H, n] fp32 or fp64, V [K, n, d], W_O [H, d, D], K | H, sink_mass [H]"
        )
    total = A.sum(-1) if sink_mass is None else A.sum(-1) + sink_mass
    if not bool((total <= 1.001).all() & torch.isfinite(V).all()):  # NaN compares as false
        raise TheoryError(f"A sums to {float(total.max()):.4g}, or V is not finite; allowed: sums of at most 1")
    _check_sets(keep, "keep", H, n)
    if stage1 is not None:
        _check_sets(stage1, "stage1", H, n)
        if stage1.shape != keep.shape or bool((stage1 & ~keep).any()):
            raise TheoryError("stage1 is no subset of keep; allowed: the same shape, and every first-stage key is kept")


def _check_sets(sets: Tensor, name: str, n_heads: int, n: int) -> None:
    shape: Sequence[int] = sets.shape
    fits = sets.dtype == torch.bool and len(shape) == 3 and shape[2] == n and shape[0] and shape[1]
    if not fits or n_heads % shape[1]:
        raise TheoryError(f"{name} is {sets.dtype} {list(shape)}; allowed: bool [sets, heads, {n}], heads | {n_heads}")

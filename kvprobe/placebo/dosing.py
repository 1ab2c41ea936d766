"""Graded blows: the bias −β on a key set's logits that has a wanted share of the effect of its removal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvprobe.errors import InterventionError, TheoryError, quote
from kvprobe.placebo.deltas import deltas
from kvprobe.placebo.keysets import KeySet, key_set, text
from kvprobe.placebo.scope import Indices, PerLayer, Scope
from kvprobe.spans.inputs import TraceLike
from kvprobe.theory import kappa as kappa_of
from kvprobe.theory import kappa_inverse, projected_norms

KAPPAS = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Dose:
    """One dose: β in nats (inf removes), the share κ of the full strength, ``perturbation`` and ``bound`` strengths."""

    kappa: float
    beta: float
    strengths: dict[str, float]


@torch.no_grad()
def doses(
    trace: TraceLike,
    keys: Any,
    kappas: Sequence[float] = KAPPAS,
    *,
    layers: Indices = None,
    heads: PerLayer = None,
    p: int = 1,
    after: bool = False,
    layer_weights: Any = None,
) -> tuple[Dose, ...]:
    """One β for each κ, so that the set's perturbation on clean logits is κ times that of its removal.

    Each head's z′ − z is scaled by κ_h(β) = (1 − e^{−β}) R / (R + a_S e^{−β}); β solves
    Σ_layers mean_q ‖Σ_h κ_h(β) (z′ − z)_h W_O^h‖_p = κ · Σ_layers mean_q ‖Σ_h (z′ − z)_h W_O^h‖_p.

    Parameters
    ----------
    trace, layers, heads, p, after, layer_weights
        As in :func:`kvprobe.placebo.window_strengths`.
    keys : key set
        A span, a list of disjoint spans, or names of the trace's spans.
    kappas : sequence of float
        Shares in (0, 1]; 1 is removal, β = inf.

    Returns
    -------
    tuple of Dose
        In the order of ``kappas``.

    Raises
    ------
    PromptError
        Keys that do not fit the trace.
    InterventionError
        A share outside (0, 1]; layers, heads or weights that the trace does not have.
    TheoryError
        A set that no row sees, or that leaves some row without attention (R = 0).

    Notes
    -----
    Derived for kvprobe. κ is exact on clean logits: from the second masked layer on, logits have moved.
    """
    scope = Scope(trace, layers, heads, p, after, layer_weights)
    checked = key_set(keys, trace.n, "keys", getattr(trace, "spans", None))
    return doses_of_each(scope, [checked], kappas)[0]


@torch.no_grad()
def doses_of_each(scope: Scope, sets: Sequence[KeySet], kappas: Sequence[float] = KAPPAS) -> list[tuple[Dose, ...]]:
    """:func:`doses` of several sets, all shares of all sets searched at once."""
    shares = [_share(share) for share in kappas]
    curves = Curves.of(scope, sets)
    full = curves.strengths(np.full(len(sets), math.inf), np.arange(len(sets)))
    for keys, strength in zip(sets, full["perturbation"], strict=True):
        if not strength > 0:
            raise TheoryError(
                f"the set {text(keys)} is seen by no row of this trace; allowed: a set that some row sees"
            )
    number, share = np.repeat(np.arange(len(sets)), len(shares)), np.tile(shares, len(sets))
    betas = curves.betas(share, number, full["perturbation"])
    found = curves.strengths(betas, number)
    every = [
        Dose(float(share[i]), float(betas[i]), {name: float(values[i]) for name, values in found.items()})
        for i in range(len(number))
    ]
    return [tuple(every[i * len(shares) : (i + 1) * len(shares)]) for i in range(len(sets))]


@dataclass(frozen=True)
class Part:
    """One layer of :class:`Curves`: masses and θ [H, Q, P], z′ − z [P, Q, H, d], the layer's W_O [H·d, D]."""

    weight: float
    mass: Tensor
    retained: Tensor
    theta: Tensor
    shift: Tensor
    w_o: Tensor


@dataclass(frozen=True)
class Curves:
    """Strengths of several sets as functions of β: per layer, what their clean run needs; ``share`` is [Q, P]."""

    parts: list[Part]
    share: Tensor
    p: int

    @staticmethod
    def of(scope: Scope, sets: Sequence[KeySet]) -> Curves:
        """Read the clean run once."""
        parts = []
        for delta in deltas(scope, sets, norms=True):
            mass = delta.sums.mass
            # A row that a set is not seen in keeps all.
            retained = torch.where(mass > 0, delta.sums.retained, 1.0)
            shift = delta.shift.permute(1, 2, 0, 3, 4).flatten(2, 3)
            W_O = delta.layer.heads.w_o
            parts.append(Part(delta.layer.weight, mass, retained, delta.sums.bound, shift, W_O.flatten(0, 1)))
        share = scope.rows(scope.queries, torch.tensor([keys[-1][1] for keys in sets]), sets)
        return Curves(parts, share.to(parts[0].mass.device), scope.p)

    def strengths(self, betas: np.ndarray, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Σ_layers mean_q L_layer and Σ θ of sets ``numbers`` [E] at ``betas`` [E], each [E]."""
        beta, number = torch.from_numpy(np.asarray(betas, dtype=float)), torch.from_numpy(np.asarray(numbers))
        beta, number = beta.to(self.share.device), number.to(self.share.device)
        terms = torch.stack([self._terms(part, beta, number) for part in self.parts]).sum(0).cpu().numpy()
        return {"perturbation": terms[0], "bound": terms[1]}

    def betas(self, share: np.ndarray, number: np.ndarray, full: np.ndarray) -> np.ndarray:
        """β [E] whose perturbation is ``share`` [E] of the set's ``full`` [P]: roots on ln β, bracketed."""
        found = np.full(len(share), math.inf)
        open_ = np.flatnonzero(share < 1)
        if not len(open_):
            return found

        def miss(x: np.ndarray, part: np.ndarray, of: np.ndarray) -> np.ndarray:
            flat = [np.ravel(each) for each in np.broadcast_arrays(x, part, of)]
            of_flat = flat[2].astype(int)
            reached = self.strengths(np.exp(flat[0]), of_flat)["perturbation"] / full[of_flat]
            return np.reshape(reached - flat[1], np.shape(x))

        low, high = np.log(np.array([self._bracket(share[i], number[i]) for i in open_]).T)
        args = (share[open_], number[open_].astype(float))
        # Where heads oppose each other in a layer, κ_h < κ for every head does not yet mean L < κ L∞.
        while (above := miss(low, *args) > 0).any():
            low = low - above
        while (below := miss(high, *args) < 0).any():
            high = high + below
        from scipy.optimize import elementwise

        tolerances = {"xatol": 1e-12, "xrtol": 1e-12, "fatol": 0.0, "frtol": 0.0}
        found[open_] = np.exp(elementwise.find_root(miss, (low, high), args=args, tolerances=tolerances).x)
        return found

    def _bracket(self, share: float, number: int) -> tuple[float, float]:
        """Smallest and largest of the heads' own β for κ, a little apart."""
        betas, seen = [], []
        for part in self.parts:
            mass, retained = part.mass[..., number], part.retained[..., number]
            betas.append(kappa_inverse(share, mass, retained).flatten())
            seen.append(mass.flatten() > 0)
        chosen = torch.cat(betas)[torch.cat(seen)]
        return float(chosen.min()) * (1 - 1e-9), float(chosen.max()) * (1 + 1e-9)

    def _terms(self, part: Part, beta: Tensor, number: Tensor) -> Tensor:
        """The layer's terms of both strengths, [2, E]."""
        scale = kappa_of(beta, part.mass[..., number], part.retained[..., number])  # [H, Q, E]
        rows = part.shift[number] * scale.permute(2, 1, 0).unsqueeze(-1)  # [E, Q, H, d]
        flat = rows.flatten(2).flatten(0, 1).to(part.w_o.dtype)
        L = projected_norms(flat, part.w_o, self.p).double().view(len(beta), -1)
        theta = (part.theta[..., number] * scale).sum(0).T
        share = self.share[:, number].T
        return part.weight * torch.stack([(L * share).sum(1), (theta * share).sum(1)])


def _share(given: Any) -> float:
    try:
        share = float(given)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 < share <= 1:
        raise InterventionError(f"kappa = {quote(given)}; allowed: 0 < kappa <= 1 (1 removes)")
    return share

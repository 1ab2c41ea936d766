"""Graded blows: the bias −β on a key set's logits that has a wanted share of the effect of its removal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import brentq
from torch import Tensor

from kvprobe.errors import InterventionError, TheoryError, quote
from kvprobe.placebo.deltas import Delta, deltas
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
    shares = [_share(share) for share in kappas]
    curve = Curve.of(scope, checked)
    full = curve.strengths(math.inf)
    if not full["perturbation"] > 0:
        raise TheoryError(f"the set {text(checked)} is seen by no row of this trace; allowed: a set that some row sees")
    betas = [curve.beta(share * full["perturbation"], share) for share in shares]
    return tuple(Dose(share, beta, curve.strengths(beta)) for share, beta in zip(shares, betas, strict=True))


@dataclass(frozen=True)
class Curve:
    """Strength of one set as a function of β: per layer, what its clean run needs."""

    parts: list[Delta]
    p: int

    @staticmethod
    def of(scope: Scope, keys: KeySet) -> Curve:
        """Read the clean run once."""
        return Curve(list(deltas(scope, [keys], norms=True)), scope.p)

    def strengths(self, beta: float) -> dict[str, float]:
        """Σ_layers mean_q L_layer and Σ θ at β."""
        terms = [self._terms(part, beta) for part in self.parts]
        return {"perturbation": sum(L for L, _ in terms), "bound": sum(theta for _, theta in terms)}

    def beta(self, wanted: float, share: float) -> float:
        """β whose perturbation is ``wanted``: a root on ln β between doses that are surely too low and too high."""
        if share == 1:
            return math.inf
        low, high = self._bracket(share)
        miss = [self.strengths(beta)["perturbation"] - wanted for beta in (low, high)]
        # Where heads oppose each other in a layer, κ_h < κ for every head does not yet mean L < κ L∞.
        while miss[0] > 0:
            low /= 2
            miss[0] = self.strengths(low)["perturbation"] - wanted
        while miss[1] < 0:
            high *= 2
            miss[1] = self.strengths(high)["perturbation"] - wanted
        if 0 in miss or low == high:
            return low if miss[0] == 0 else high
        root = brentq(
            lambda x: self.strengths(math.exp(x))["perturbation"] - wanted, math.log(low), math.log(high), xtol=1e-12
        )
        return math.exp(root)

    def _bracket(self, share: float) -> tuple[float, float]:
        """Smallest and largest of the heads' own β for κ."""
        betas = torch.cat([kappa_inverse(share, *_masses(part)).flatten() for part in self.parts])
        seen = torch.cat([part.sums.mass.flatten() for part in self.parts]) > 0
        return float(betas[seen].min()), float(betas[seen].max())

    def _terms(self, part: Delta, beta: float) -> tuple[float, float]:
        scale = kappa_of(beta, *_masses(part))  # [H, Q]
        W_O = part.layer.heads.w_o
        shift = part.shift[:, 0] * part.layer.grouped(scale).unsqueeze(-1)
        rows = shift.transpose(0, 1).flatten(1).to(W_O.dtype)
        L = projected_norms(rows, W_O.flatten(0, 1), self.p).double()
        theta = (part.sums.bound[..., 0] * scale).sum(0)
        return part.layer.weight * float(L @ part.share), part.layer.weight * float(theta @ part.share)


def _masses(part: Delta) -> tuple[Tensor, Tensor]:
    """a_S and R, [H, Q]; a row that the set is not seen in keeps all."""
    mass, retained = part.sums.mass[..., 0], part.sums.retained[..., 0]
    return mass, torch.where(mass > 0, retained, 1.0)


def _share(given: Any) -> float:
    try:
        share = float(given)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 < share <= 1:
        raise InterventionError(f"kappa = {quote(given)}; allowed: 0 < kappa <= 1 (1 removes)")
    return share

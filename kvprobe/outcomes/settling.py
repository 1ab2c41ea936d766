"""Settling depth: the layer from which on a token's distribution is close to the one that the model ends with.

Chen et al., *Think Deep, Not Just Long: Measuring LLM Reasoning Effort via Deep-Thinking Tokens*, arXiv 2602.13517,
2026: the logit lens at every layer, its Jensen-Shannon divergence to the final distribution, a threshold g, and a token
called deep if it settles in the last layers. Layers count from 1 to L throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from kvprobe.errors import InterventionError, TheoryError, quote
from kvprobe.outcomes.lens import Lens
from kvprobe.outcomes.outcome import Outcome
from kvprobe.streams import Streams

RULES = ("first", "stays")

CHUNK_BYTES = 48 << 20
"""Logits of one matrix product: enough rows for it to be efficient; at most four such tensors exist at a time."""

CACHED_BYTES = 1 << 19
"""Rows of a product that are turned into a divergence together, so that they stay in the processor's cache."""


@dataclass(frozen=True)
class Settling:
    """When each row of one arm settled.

    Attributes
    ----------
    depth
        [T] layers, 1 … L.
    divergence
        [L, T] Jensen-Shannon divergence to the final distribution, in bits; another threshold or rule can be read off
        it by :func:`settling_depth`.
    threshold, rule
        Those of ``depth``.
    """

    depth: Tensor
    divergence: Tensor
    threshold: float
    rule: str

    def deep(self, rho: float = 0.85) -> Tensor:
        """Which rows settled deep, bool [T] (see :func:`deep_from`)."""
        return deep(self.depth, len(self.divergence), rho)


def settle(
    model: Any,
    outcome: Outcome | Streams,
    rows: slice | Sequence[int] | Tensor | None = None,
    threshold: float = 0.5,
    rule: str = "first",
    final: Tensor | None = None,
) -> Settling:
    """Settling depth of an arm's last rows, from its hidden states after every layer.

    Parameters
    ----------
    outcome
        An arm that kept its streams (``intervene(…, streams=k)``), or the streams: k rows, the run's last ones.
    rows
        Which of the k rows, as a slice or indices; all by default. With ``streams=len(answer) + 1`` the rows that
        predict the answer are ``slice(-1)``.
    threshold, rule
        See :func:`settling_depth`.
    final
        Logits [T, V] to settle on, one row for each row chosen; by default the lens of this run's own last layer.

    Returns
    -------
    Settling
        Depth [T] and divergence [L, T], on the CPU.

    Raises
    ------
    CapabilityError
        If the model's lens cannot be proven.
    InterventionError
        If the outcome kept no streams, or the rows are not among them.
    TheoryError
        On a threshold or rule that is not allowed, ``final`` of another shape, or hidden states that are not finite.
    """
    _check_rule(threshold, rule)
    resid, lens = _chosen(outcome, rows), Lens.of(model)
    if final is not None and final.shape != (resid.shape[1], lens.vocab):
        raise TheoryError(f"final has the shape {list(final.shape)}; allowed: [{resid.shape[1]}, {lens.vocab}]")
    divergence = _divergences(lens, resid, final)
    return Settling(settling_depth(divergence, threshold, rule), divergence, float(threshold), rule)


def settling_depth(divergence: Tensor, threshold: float = 0.5, rule: str = "first") -> Tensor:
    """Layer at which each row settles, from its divergences to the final distribution.

    Parameters
    ----------
    divergence
        [L, T] in bits.
    threshold
        g in [0, 1]: a layer at or below it is close.
    rule
        ``"first"``: the first close layer (the same as thresholding the running minimum, which is how the source puts
        it). ``"stays"``: the first layer from which on every layer is close. The last layer is close by definition.

    Returns
    -------
    Tensor
        [T] of int64, 1 … L.

    Raises
    ------
    TheoryError
        On another rule or threshold, another shape, or divergences that are not finite.
    """
    _check_rule(threshold, rule)
    if divergence.dim() != 2 or not len(divergence):
        raise TheoryError(
            f"divergence has the shape {list(divergence.shape)}; allowed: [layers, rows], one layer or more"
        )
    _check_finite(divergence)
    close = divergence <= threshold
    close[-1] = True
    if rule == "stays":
        close = close.flip(0).int().cumprod(0).flip(0)
    return close.int().argmax(0) + 1


def deep_from(n_layers: int, rho: float = 0.85) -> int:
    """⌈ρ L⌉, the first layer at which settling counts as deep.

    The source writes this threshold also as ⌈(1 − ρ) L⌉; a token is deep here if it settles at ⌈ρ L⌉ or later. ρ is
    read as the decimal that it is printed as: in floating point 0.55 · 100 is above 55, and (1 − 0.85) · 20 above 3.

    Raises
    ------
    TheoryError
        If ρ does not lie in (0, 1] or there is no layer.
    """
    if not hasattr(n_layers, "__index__") or n_layers < 1:
        raise TheoryError(f"n_layers={quote(n_layers)}; allowed: 1 or more")
    try:
        share = Fraction(str(rho))
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise TheoryError(f"rho={quote(rho)}; allowed: above 0 and at most 1")
    return math.ceil(share * int(n_layers))


def deep(depth: Tensor, n_layers: int, rho: float = 0.85) -> Tensor:
    """Whether each settling depth is deep, bool in the shape of ``depth`` (see :func:`deep_from`)."""
    return depth >= deep_from(n_layers, rho)


@torch.no_grad()
def jensen_shannon(logits: Tensor, final: Tensor) -> Tensor:
    """Jensen-Shannon divergence of softmax(logits) and softmax(final), both [..., V]; [...] in bits, fp32.

    It is ½ KL(p ‖ m) + ½ KL(q ‖ m) with m = (p + q) / 2, worked out as ½ Σ p ln p + ½ Σ q ln q − Σ m ln m: one
    logarithm a token instead of a ``logaddexp``, and equal to that form within 1e-5 bits. Rounding is left in: two
    equal distributions may come out at ±2e-6.
    """
    if logits.shape != final.shape or not logits.dim():
        raise TheoryError(f"logits {list(logits.shape)} and {list(final.shape)}; allowed: two of one shape, [..., V]")
    return _to(_reference(final.float()), logits.float())


def _reference(final: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(p, Σ p, Σ p ln p) of logits [..., V], as they come out of fp32."""
    logs = final.log_softmax(-1)
    p = logs.exp()
    mass, inner = p.sum(-1), torch.linalg.vecdot(p, logs)
    # Where both probabilities underflow, s ln s is 0 · ln(tiny) = 0 instead of 0 · −∞.
    return p.add_(torch.finfo(torch.float32).tiny), mass, inner


def _to(reference: tuple[Tensor, Tensor, Tensor], logits: Tensor) -> Tensor:
    """Divergence of logits [..., V] from a reference; two tensors of their size are allocated, and reused."""
    p, mass, inner = reference
    logs = logits.log_softmax(-1)
    q = logs.exp()
    mine, own = torch.linalg.vecdot(q, logs), q.sum(-1)
    total = q.add_(p)
    both = torch.linalg.vecdot(total, torch.log(total, out=logs))
    # fp32 probabilities miss a sum of 1 by up to 6e-6: each sum is taken as one of shares of its own mass, and p and q
    # weigh in m as they do in p + q, so that the miss is not multiplied by an entropy.
    mass_m = mass + own
    nats = _centred(inner, mass) + _centred(mine, own) - _centred(both, mass_m)
    return nats / (mass_m * math.log(2))


def _centred(inner: Tensor, mass: Tensor) -> Tensor:
    """Σ x ln (x / Σ x), from Σ x ln x and Σ x."""
    return inner - mass * mass.log()


def _divergences(lens: Lens, resid: Tensor, final: Tensor | None) -> Tensor:
    """[L, T] in bits of hidden states [L, T, D], as many rows at a time as one matrix product takes."""
    size = max(1, CHUNK_BYTES // (4 * lens.vocab))
    out = torch.zeros(resid.shape[:2])
    for rows in _pieces(resid.shape[1], size):
        _fill(out[:, rows], lens, resid[:, rows], None if final is None else final[rows], size)
    _check_finite(out)
    return out


def _fill(out: Tensor, lens: Lens, resid: Tensor, final: Tensor | None, size: int) -> None:
    """Divergences of these rows; one matrix product a chunk of layers × rows."""
    known = len(resid) - (final is None)  # the last layer's distance to itself is 0
    reference = _reference(lens(resid[-1]) if final is None else final.to(lens.weight.device, torch.float32))
    for layers in _pieces(known, max(1, size // resid.shape[1])):
        out[layers] = torch.stack([_by_rows(reference, logits) for logits in lens(resid[layers])]).cpu()


def _by_rows(reference: tuple[Tensor, Tensor, Tensor], logits: Tensor) -> Tensor:
    """[T] divergences of one layer's logits [T, V], a few rows at a time."""
    few = _pieces(len(logits), max(1, CACHED_BYTES // (4 * logits.shape[1])))
    p, mass, inner = reference
    return torch.cat([_to((p[rows], mass[rows], inner[rows]), logits[rows]) for rows in few])


def _pieces(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _chosen(outcome: Outcome | Streams, rows: Any) -> Tensor:
    """Hidden states [L, T, D] of the rows asked for."""
    streams = outcome.streams if isinstance(outcome, Outcome) else outcome
    if streams is None:
        raise InterventionError("this outcome kept no streams: call intervene(…, streams=k)")
    if not isinstance(streams, Streams):
        raise InterventionError(f"outcome={quote(outcome)} is not allowed: give an Outcome, or its streams")
    resid = streams.resid_post
    if rows is None or isinstance(rows, slice):
        return resid if rows is None else resid[:, rows]
    return resid[:, _indices(rows, resid.shape[1])]


def _indices(rows: Any, k: int) -> Tensor:
    """Row indices as a tensor, none out of range."""
    try:
        index = torch.as_tensor(rows)
    except (TypeError, ValueError, RuntimeError):
        index = torch.tensor(torch.nan)
    index = index if index.numel() else index.long()  # an empty list has no dtype of its own
    whole = index.dim() == 1 and not index.is_floating_point() and index.dtype != torch.bool
    if not whole or bool(((index < -k) | (index >= k)).any()):
        raise InterventionError(f"rows={quote(rows)}; allowed: a slice, or indices among the {k} rows that were kept")
    return index


def _check_rule(threshold: float, rule: str) -> None:
    if rule not in RULES:
        raise TheoryError(f"rule={quote(rule)}; allowed: {', '.join(RULES)}")
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise TheoryError(f"threshold={quote(threshold)}; allowed: 0 … 1 bits")


def _check_finite(divergence: Tensor) -> None:
    bad = (~divergence.isfinite()).nonzero()
    if len(bad):
        layer, row = bad[0].tolist()
        raise TheoryError(f"the divergence of layer {layer + 1}, row {row} is {float(divergence[layer, row])}")

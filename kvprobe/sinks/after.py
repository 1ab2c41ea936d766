"""The same scores after an intervention, on attention from which the arithmetic of renormalisation is taken out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvprobe import theory
from kvprobe.errors import InterventionError, quote
from kvprobe.outcomes import Outcome
from kvprobe.sinks.scores import EPSILON, Scores, check_epsilon
from kvprobe.sinks.streaming import Array, layer_norms
from kvprobe.theory.checks import check_p
from kvprobe.traces import LayerView, Trace

READINGS = ("corrected", "conditional", "raw")
BLOCK_BYTES = 32 << 20
"""Of one [H, rows, n] tensor of attention; a handful of them are held at once."""

_PAIRS = {"corrected": ("clean", "corrected"), "conditional": ("shares", "masked"), "raw": ("clean", "masked")}


def after(
    outcome: Outcome,
    clean: Outcome | Trace,
    *,
    epsilon: float = EPSILON,
    p: int = 1,
    rows: Sequence[int] | None = None,
) -> dict[str, tuple[Scores, Scores]]:
    """Sink scores before and after an intervention, read three ways on the same rows.

    ``corrected``: A_clean against Ã′ = A′ R = N ⊙ A⁺, with R of the arm's own unmasked row. ``conditional``:
    N ⊙ A_clean / R_clean against A′, shares among the surviving keys. ``raw``: A_clean against A′; survivors are
    inflated by 1 / R there with no mechanism at all, so it may stand beside the other two, never alone.

    Parameters
    ----------
    outcome
        An arm that kept its trace. Its masks are −∞; under value gates the norms are those of ungated values.
    clean
        The arm that masks nothing, or a trace of its rows.
    epsilon, p
        As in :func:`kvprobe.sinks.scores`.
    rows
        Positions to average over, left pads counted; None: all that both have.

    Returns
    -------
    dict of str to (Scores, Scores)
        Reading → (before, after). A cut key keeps its place with mass 0 (``seen`` counts rows that could see it without
        the mask). Norms are the clean run's before and the arm's after: own tokens have other values there.

    Raises
    ------
    InterventionError
        An arm without a trace, with patched entries or a finite bias; rows that one of them does not have.

    Notes
    -----
    CriticalKV (Feng et al., arXiv 2502.03805), Theorem 3.2; both readings are derived for kvprobe.
    """
    epsilon = check_epsilon(epsilon)
    check_p(p)
    arm, before = _trace_of(outcome, "outcome"), _trace_of(clean, "clean")
    _only_masks(outcome)
    chosen = _shared(arm, before, rows)
    layers = [_Sums.zero(arm) for _ in range(arm.n_layers)]
    for part in _chunks(chosen, arm):
        mine, theirs = replace(outcome, trace=_at(arm, part)), _at(before, part)
        for index, layer in enumerate(layers):
            layer.add(mine, theirs.layer(index), p)
    made = {kind: _scores(layers, kind, chosen, arm.pad, p, epsilon) for kind in _KINDS}
    return {reading: (made[one], made[other]) for reading, (one, other) in _PAIRS.items()}


_AFTER = ("corrected", "shares", "masked")
_KINDS = ("clean", *_AFTER)


@dataclass
class _Sums:
    """Sums over rows of one layer: kind → Σ A [H, n] and, of the learned sink, [H]; rows that see a key [n]."""

    masses: dict[str, Tensor]
    learned: dict[str, Tensor]
    seen: Tensor
    norms: dict[str, Array] = field(default_factory=dict)
    rows: int = 0

    @classmethod
    def zero(cls, trace: Trace) -> _Sums:
        def zeros(*shape: int) -> dict[str, Tensor]:
            return {name: torch.zeros(shape, dtype=torch.float64) for name in _KINDS}

        return cls(zeros(trace.n_heads, trace.n), zeros(trace.n_heads), torch.zeros(trace.n, dtype=torch.int64))

    def add(self, arm: Outcome, clean: LayerView, p: int) -> None:
        """One block of rows: ``arm`` and ``clean`` hold the same positions."""
        assert arm.trace is not None
        keep, view = arm.keep(clean.index), arm.trace.layer(clean.index)
        (own, own_sink), (rows, sink) = view.rows(), clean.rows()
        masked, masked_sink = replace(view, logits=view.logits.masked_fill(~keep, -torch.inf)).rows()
        self._add("clean", rows, sink)
        self._add("corrected", theory.correct(masked, theory.retained(own, keep, own_sink)), own_sink)
        self._add("shares", theory.conditional(rows, keep, sink), _over(sink, theory.retained(rows, keep, sink)))
        self._add("masked", masked, masked_sink)
        self.seen += (clean.logits > -torch.inf).any(0).sum(0).cpu()
        self.rows += rows.shape[1]
        if not self.norms:
            before, behind = _norms(clean, view, p)
            self.norms = {"clean": before, "shares": before, "corrected": behind, "masked": behind}

    def _add(self, kind: str, attention: Tensor, learned: Tensor | None) -> None:
        self.masses[kind] += attention.sum(1, dtype=torch.float64).cpu()
        if learned is not None:
            self.learned[kind] += learned.sum(1, dtype=torch.float64).cpu()

    def mean(self, kind: str) -> Array:
        """s [H, n]; NaN where no row sees the key."""
        return torch.where(self.seen > 0, self.masses[kind] / self.seen, torch.nan).numpy()


def _norms(clean: LayerView, arm: LayerView, p: int) -> tuple[Array, Array]:
    """m before and after, each [H, n]; worked out anew only for keys whose values differ (the context's are shared)."""
    before = layer_norms(clean, p)
    behind, other = before.copy(), (clean.values != arm.values).any(-1).any(0)
    if other.any():
        behind[:, other.cpu().numpy()] = layer_norms(replace(arm, values=arm.values[:, other]), p)
    return before, behind


def _over(sink: Tensor | None, retained: Tensor) -> Tensor | None:
    return None if sink is None else sink / retained


def _scores(layers: Sequence[_Sums], kind: str, rows: Sequence[int], pad: int, p: int, epsilon: float) -> Scores:
    return Scores(
        np.stack([layer.mean(kind) for layer in layers]),
        np.stack([layer.norms[kind] for layer in layers]),
        np.stack([layer.seen.numpy() for layer in layers]),
        np.stack([(layer.learned[kind] / layer.rows).numpy() for layer in layers]),
        tuple(rows),
        pad,
        p,
        epsilon,
    )


def _only_masks(outcome: Outcome) -> None:
    if any(0 > cut.bias > -torch.inf for bias in outcome.biases.values() for cut in bias.cuts):
        raise InterventionError("after is defined for −∞ masks; this arm has a finite beta")
    if outcome.patched:
        raise InterventionError(
            f"layers {list(outcome.patched)} ran with patched keys or values, which the trace does not hold: after is "
            "defined for arms without patches"
        )


def _trace_of(given: Any, name: str) -> Trace:
    found = given.trace if isinstance(given, Outcome) else given
    if isinstance(given, Outcome) and found is None:
        raise InterventionError(f"{name} kept no trace: call intervene(…, keep_trace=True)")
    if not isinstance(found, Trace) or (name == "outcome" and not isinstance(given, Outcome)):
        allowed = "an Outcome" if name == "outcome" else "the clean arm's Outcome or a Trace"
        raise InterventionError(f"{name}={quote(given)} is not allowed: give {allowed}")
    return found


def _shared(arm: Trace, clean: Trace, rows: Sequence[int] | None) -> list[int]:
    """Positions that are averaged over, in ascending order."""
    both = sorted(set(arm.queries) & set(clean.queries))
    if arm.n != clean.n or not both:
        raise InterventionError(
            f"the two runs share no rows: {arm.n} and {clean.n} keys, rows {_range(arm)} and {_range(clean)}"
        )
    if rows is None:
        return both
    chosen = sorted({int(row) for row in rows})
    if not chosen or set(chosen) - set(both):
        missing = sorted(set(chosen) - set(both))[:5]
        raise InterventionError(f"rows {missing} are not in both runs: allowed are those of {both[0]} … {both[-1]}")
    return chosen


def _range(trace: Trace) -> str:
    return f"{min(trace.queries)} … {max(trace.queries)}"


def _chunks(rows: Sequence[int], trace: Trace) -> Iterator[Sequence[int]]:
    step = max(1, BLOCK_BYTES // (4 * trace.n_heads * trace.n))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _at(trace: Trace, rows: Sequence[int]) -> Trace:
    """The trace of these rows alone."""
    place = {query: index for index, query in enumerate(trace.queries)}
    index = [place[row] for row in rows]
    return replace(trace, queries=list(rows), data=[replace(each, query=each.query[:, index]) for each in trace.data])

"""How hard the removal of keys hits, read off the clean run: every window of a length at once, or given key sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvprobe.errors import InterventionError, PromptError, quote
from kvprobe.placebo.keysets import KeySet, key_set, positions, size
from kvprobe.placebo.scope import Indices, Layer, PerLayer, Scope
from kvprobe.placebo.sums import NEARLY_ALL, Cut, Sums
from kvprobe.spans.inputs import TraceLike
from kvprobe.spans.windows import outside_sums, window_sums
from kvprobe.theory.norms import row_blocks
from kvprobe.theory.perturbation import norm

MEASURES = ("bound", "perturbation", "centred", "value_mass", "mass")
SCANNED = ("bound", "value_mass", "mass")
SETS_AT_ONCE = 256


@dataclass(frozen=True)
class Windows:
    """Strengths of every window [start, start + length), arrays [n − length + 1] float64 over starts.

    NaN where the window leaves some row without attention (R = 0), or where no row is touched.
    """

    length: int
    bound: np.ndarray
    value_mass: np.ndarray
    mass: np.ndarray


@torch.no_grad()
def window_strengths(
    trace: TraceLike,
    length: int,
    *,
    layers: Indices = None,
    heads: PerLayer = None,
    p: int = 1,
    after: bool = False,
    layer_weights: Any = None,
) -> Windows:
    """θ, w_S and a_S of every window of ``length`` keys, summed over layers and heads, averaged over touched rows.

    Parameters
    ----------
    trace : TraceLike
        The clean run; its rows are those that a mask would touch.
    length : int
        Keys in a window, from 1 to n.
    layers, heads
        As in ``KVMask``: None for all, one index, several; heads also ``{layer: heads}``.
    p : {1, 2}
        The norm.
    after : bool
        Average over the rows at or after a window's stop instead of all.
    layer_weights : sequence of float, optional
        One factor a layer, for example 1 / mean residual norm.

    Returns
    -------
    Windows
        Float64 arrays over starts.

    Raises
    ------
    PromptError
        A length outside [1, n].
    InterventionError
        Layers, heads or weights that the trace does not have.
    TheoryError
        p is neither 1 nor 2.

    Notes
    -----
    Theorem 3.3 of CriticalKV (arXiv 2502.03805) for θ. Sums by additions only, in float64.
    """
    scope = Scope(trace, layers, heads, p, after, layer_weights)
    return scan(scope, length)


def set_strengths(
    trace: TraceLike,
    sets: Iterable[Any],
    *,
    measures: Sequence[str] = MEASURES,
    layers: Indices = None,
    heads: PerLayer = None,
    p: int = 1,
    after: bool = False,
    layer_weights: Any = None,
) -> pd.DataFrame:
    """Strengths of given key sets, summed over layers and heads, averaged over touched rows.

    ``bound`` = Σ θ, ``centred`` = Σ θ_c, ``value_mass`` = Σ w_S, ``mass`` = Σ a_S over layers and heads;
    ``perturbation`` = Σ over layers of L_layer = ‖Σ_h (z′ − z)_h W_O^h‖_p over the chosen heads.

    Parameters
    ----------
    trace, layers, heads, p, after, layer_weights
        As in :func:`window_strengths`.
    sets : iterable of key sets
        Each a span, a list of disjoint spans, or names of the trace's spans.
    measures : sequence of str
        Columns wanted. ``centred`` costs most, ``perturbation`` next.

    Returns
    -------
    pandas.DataFrame
        One row a set, in order: the measures, ``length`` (keys), ``start``, ``stop`` (first and last edge).

    Raises
    ------
    PromptError
        No set, a set that is empty, overlaps itself or is not within [0, n), or one that no row follows (``after``).
    InterventionError
        An unknown measure; layers, heads or weights that the trace does not have.
    TheoryError
        A set that holds all attention of some row (R = 0, no learned sink), by name; p is neither 1 nor 2.

    Notes
    -----
    Theorem 3.3 of CriticalKV (arXiv 2502.03805) for θ; L and θ_c are derived for kvprobe. L ≤ θ_c ≤ θ.
    """
    unknown = [name for name in ([measures] if isinstance(measures, str) else measures) if name not in MEASURES]
    if unknown or isinstance(measures, str) or not measures:
        raise InterventionError(f"measures={quote(measures)}; allowed: a list of {', '.join(MEASURES)}")
    named = getattr(trace, "spans", None)
    if isinstance(sets, str) or not isinstance(sets, Iterable):
        raise PromptError(f"sets is {quote(sets)}; allowed: a list of key sets")
    checked = [key_set(keys, trace.n, f"set {number}", named) for number, keys in enumerate(sets)]
    if not checked:
        raise PromptError("no key sets given; allowed: at least one")
    return measure(Scope(trace, layers, heads, p, after, layer_weights), checked, measures)


@torch.no_grad()
def scan(scope: Scope, length: int) -> Windows:
    """:func:`window_strengths` of a scope."""
    n = scope.trace.n
    if isinstance(length, bool) or not hasattr(length, "__index__") or not 1 <= length <= n:
        raise PromptError(f"length = {quote(length)} with n = {n} keys; allowed: a whole number from 1 to {n}")
    stops = torch.arange(length, n + 1)
    total = torch.zeros(len(SCANNED), len(stops), dtype=torch.float64)
    share = scope.rows(scope.queries, stops)
    for layer in scope.visit(norms=True, margin=length - 1):
        rows = share.to(layer.heads.A.device)
        found = _windows(layer, length)
        lo = layer.heads.first
        hi = lo + found.shape[-1]
        total[:, lo:hi] += layer.weight * (found * rows[:, lo:hi]).sum(1).cpu()
    total = total.where(share.isnan().any(0).logical_not().cpu(), torch.nan)
    return Windows(int(length), **dict(zip(SCANNED, total.numpy(), strict=True)))


@torch.no_grad()
def measure(scope: Scope, sets: Sequence[KeySet], measures: Sequence[str], strict: bool = True) -> pd.DataFrame:
    """:func:`set_strengths` of a scope and checked sets; NaN in place of errors where not ``strict``."""
    totals = torch.stack([part.sum(0) for part in by_layer(scope, sets, measures, strict)])
    lengths = {"length": [size(keys) for keys in sets]}
    edges = {"start": [keys[0][0] for keys in sets], "stop": [keys[-1][1] for keys in sets]}
    columns = dict(zip(measures, totals.numpy(), strict=True))
    return pd.DataFrame({**columns, **lengths, **edges})


@torch.no_grad()
def profiles(scope: Scope, sets: Sequence[KeySet]) -> Tensor:
    """Mean θ over touched rows of every layer and head, [P, cells] float64; NaN where a row has no attention left."""
    stops = torch.tensor([keys[-1][1] for keys in sets])
    share = scope.rows(scope.queries, stops)
    cells = []
    for layer in scope.visit(norms=True):
        theta = Sums.of(layer, Cut.of(sets, layer.heads.extent), strict=False).bound
        cells.append((theta * share.to(theta.device)).sum(1).cpu())
    return torch.cat(cells).T


@torch.no_grad()
def by_layer(scope: Scope, sets: Sequence[KeySet], measures: Sequence[str], strict: bool = True) -> list[Tensor]:
    """Each measure's weighted layer terms, [layers, P] float64."""
    stops = torch.tensor([keys[-1][1] for keys in sets])
    share = scope.rows(scope.queries, stops, sets if strict else None)
    cuts: dict[Any, list[Cut]] = {}
    terms: dict[str, list[Tensor]] = {name: [] for name in measures}
    for layer in scope.visit(norms=bool({"bound", "value_mass"} & {*measures})):
        extent = layer.heads.extent
        if extent not in cuts:
            starts = range(0, len(sets), SETS_AT_ONCE)
            cuts[extent] = [Cut.of(sets[start : start + SETS_AT_ONCE], extent) for start in starts]
        parts = [_terms(layer, cut, measures, scope.p, strict) for cut in cuts[extent]]
        for name in measures:
            rows = torch.cat([part[name] for part in parts], -1)
            terms[name].append(layer.weight * (rows * share.to(rows.device)).sum(0).cpu())
    return [torch.stack(terms[name]) for name in measures]


def _terms(layer: Layer, cut: Cut, measures: Sequence[str], p: int, strict: bool) -> dict[str, Tensor]:
    """Each measure of each row and set, [Q, P], summed over heads (L: after the sum over heads)."""
    sums = Sums.of(layer, cut, strict)
    ways: dict[str, Callable[[], Tensor]] = {
        "mass": lambda: sums.mass.sum(0),
        "value_mass": lambda: sums.evicted_value_mass.sum(0),
        "bound": lambda: sums.bound.sum(0),
        "perturbation": lambda: _in_blocks(layer, cut, lambda at, part: _layer_norms(layer, sums.part(at), part, p)),
        "centred": lambda: _in_blocks(layer, cut, lambda at, part: _centred(layer, sums.part(at), part, p)),
    }
    return {name: ways[name]() for name in measures}


def _in_blocks(layer: Layer, cut: Cut, measured: Callable[[slice, Cut], Tensor]) -> Tensor:
    """A few sets at a time, so that their vectors, one a row and head, stay in the cache."""
    width = max(layer.output.numel(), layer.heads.w_o.shape[-1] * len(layer.queries))
    blocks = row_blocks(len(cut.sets), width * layer.heads.values.element_size(), layer.heads.A.device)
    return torch.cat([measured(block, cut.part(block)) for block in blocks], -1)


def _layer_norms(layer: Layer, sums: Sums, cut: Cut, p: int) -> Tensor:
    """‖Σ_h (z′ − z)_h W_O^h‖_p of each row and set, [Q, P]: one product a kv head, added up."""
    shift = sums.shift(layer, cut)
    W_O = layer.heads.w_o.unflatten(0, (len(shift), -1)).flatten(1, 2)
    rows = shift.to(W_O.dtype).flatten(3).flatten(1, 2)
    total = rows[0] @ W_O[0]
    for x, W in zip(rows[1:], W_O[1:], strict=True):
        total.addmm_(x, W)
    return norm(total, p).double().view(shift.shape[1:3]).T


def _centred(layer: Layer, sums: Sums, cut: Cut, p: int) -> Tensor:
    """θ_c = Σ_S A_i ‖z′ W_O − V_i W_O‖_p, [Q, P], summed over heads: distances between projected rows."""
    heads, exact = layer.heads, {"compute_mode": "donot_use_mm_for_euclid_dist"}
    centre = sums.centre(layer, cut)
    _, P, Q, G, _ = centre.shape
    total = centre.new_zeros(Q, P)
    columns = [_columns(keys, *heads.extent) for keys in cut.sets]
    for h, W_O in enumerate(heads.w_o):
        V = heads.values[h // G]
        basis = W_O if p == 1 else torch.linalg.qr(W_O.double().T, mode="r").R.T.to(W_O.dtype)
        for number, at in enumerate(columns):
            z = centre[h // G, number, :, h % G].to(W_O.dtype)
            distances = torch.cdist(z @ basis, V[at] @ basis, p=float(p), **exact)
            total[:, number] += (heads.A[h][:, at] * distances).sum(-1)
    return total


def _columns(keys: KeySet, first: int, k: int, device: torch.device) -> Tensor:
    """A set's keys as columns of a layer that holds ``k`` keys from ``first``."""
    return torch.tensor([at - first for at in positions(keys) if 0 <= at - first < k], dtype=torch.long, device=device)


def _windows(layer: Layer, length: int) -> Tensor:
    """θ, w_S, a_S of every window summed over heads, [3, Q, starts]; a head at a time stays in the cache."""
    heads = layer.heads
    theta, w_S, total = (heads.A.new_zeros(heads.A.shape[1], heads.A.shape[2] - length + 1) for _ in range(3))
    for h in range(len(heads.A)):
        mass, value_mass, R, w_N = _head_windows(layer, h, length)
        w_S += value_mass
        total += mass
        theta += (mass * w_N).div_(R)  # a window of one key is the row itself: nothing of it is written to
    return torch.stack([theta.add_(w_S), w_S, total])


def _head_windows(layer: Layer, h: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a_S, w_S, R, w_N of one head's windows, [Q, starts].

    A window's sum is taken from the row's: in float64 that leaves ten digits where R >= 1e-6. A head with a smaller R
    anywhere is summed outside its windows; R is NaN where a window holds all, and 1 where it is unseen.
    """
    heads, A = layer.heads, layer.heads.A[h]
    weighted = A * layer.norms[h]
    rows, weighted_rows = A.unsqueeze(-1), weighted.unsqueeze(-1)
    mass, w_S = window_sums(rows, length)[..., 0], window_sums(weighted_rows, length)[..., 0]
    R = heads.total[h].unsqueeze(-1) - mass
    if float(R.min()) >= NEARLY_ALL:
        return mass, w_S, R, weighted.sum(-1, keepdim=True) - w_S
    R, w_N = outside_sums(rows, length)[..., 0], outside_sums(weighted_rows, length)[..., 0]
    if heads.sink_mass is not None:
        R += heads.sink_mass[h].unsqueeze(-1)
    return mass, w_S, R.masked_fill_(R <= 0, torch.nan).masked_fill_(mass == 0, 1.0), w_N

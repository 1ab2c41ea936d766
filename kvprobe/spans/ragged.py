"""Given spans, of any lengths: mass, value mass, bounds and the exact perturbation, by head and by layer."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvprobe.spans.inputs import Heads, Span, TraceLike, check_spans, prepare
from kvprobe.spans.pieces import Pieces, Sums
from kvprobe.spans.table import tidy
from kvprobe.theory import projected_norms
from kvprobe.theory.checks import check_p
from kvprobe.theory.norms import row_blocks

SPANS_AT_ONCE = 256

Columns = dict[str, Tensor]
Measure = Callable[[Heads, Pieces], Columns]


@torch.no_grad()
def span_stats(trace: TraceLike, spans: Iterable[Sequence[int]], *, p: int = 1, centred: bool = True) -> pd.DataFrame:
    """Mass, value mass, bounds and exact perturbation of evicting each span, for every layer, head and query.

    Parameters
    ----------
    trace : TraceLike
        Anything with ``n`` and ``layers()``.
    spans : iterable of (start, stop)
        Half-open spans of keys in [0, n); any lengths, overlaps allowed.
    p : {1, 2}
        The norm.
    centred : bool
        Also the centred bound; its cost grows with the number of keys in all spans.

    Returns
    -------
    pandas.DataFrame
        One row per layer × head × query × span, in that order: ``layer, head, query, start, stop, mass, value_mass,
        bound, centred_bound, perturbation, visible, retained``. ``query`` is an absolute position; a_S = ``mass``,
        w_S = ``value_mass``, θ = ``bound``, θ_c = ``centred_bound`` (left out with ``centred=False``),
        L = ``perturbation``, R = ``retained`` (a learned sink included). A span without a visible key has
        ``visible`` False and 0 in these measures. A span that holds all of a row's attention, without a learned sink,
        has R = 0: no attention row is left, and ``bound, centred_bound, perturbation`` are NaN.

    Raises
    ------
    PromptError
        No span, or one that is empty or not within [0, n).
    TheoryError
        p is neither 1 nor 2.

    Notes
    -----
    L ≤ θ_c ≤ θ. Masses and L are float64 whatever the model's dtype; norms of single values (in w_S, θ, θ_c) have the
    model's, at least float32: a relative error of 1e-7. Theorem 3.3 of CriticalKV (arXiv 2502.03805) for θ; L and θ_c
    are derived for kvprobe.
    """
    return _table(trace, spans, p, lambda heads, pieces: _head_columns(heads, pieces, p, centred))


@torch.no_grad()
def layer_perturbation(trace: TraceLike, spans: Iterable[Sequence[int]], p: int = 1) -> pd.DataFrame:
    """Exact perturbation of each layer's attention output, L = ‖Σ_h (z′ − z)_h W_O^h‖_p, by query and span.

    Parameters
    ----------
    trace, spans, p
        As in :func:`span_stats`.

    Returns
    -------
    pandas.DataFrame
        One row per layer × query × span: ``layer, query, start, stop, perturbation, visible``. At most the sum of the
        heads' perturbations. NaN where some head has R = 0.

    Raises
    ------
    PromptError
        No span, or one that is empty or not within [0, n).
    TheoryError
        p is neither 1 nor 2.

    Notes
    -----
    Derived for kvprobe. In float64.
    """
    return _table(trace, spans, p, lambda heads, pieces: _layer_columns(heads, pieces, p)).drop(columns="head")


def _table(trace: TraceLike, spans: Iterable[Sequence[int]], p: int, measure: Measure) -> pd.DataFrame:
    """Run ``measure`` on batches of spans, layer by layer, and stack what it returns."""
    check_p(p)
    checked = check_spans(spans, trace.n)
    cuts: dict[tuple[int, int, torch.device], list[Pieces]] = {}
    layers, queries, parts = [], [], []
    for view in trace.layers():
        heads = prepare(view)
        if heads.extent not in cuts:
            cuts[heads.extent] = [Pieces.of(some, heads) for some in _batches(checked)]
        batches = [measure(heads, pieces) for pieces in cuts[heads.extent]]
        parts.append({name: torch.cat([batch[name] for batch in batches], -1).cpu() for name in batches[0]})
        layers.append(view.index)
        queries = view.queries.tolist()
    columns = {name: torch.stack([part[name] for part in parts]).numpy() for name in parts[0]}
    starts, stops = np.array(checked).T
    return tidy(layers, queries, starts, stops, columns)


def _head_columns(heads: Heads, pieces: Pieces, p: int, centred: bool) -> Columns:
    sums = Sums.of(heads, pieces)
    w_S, w_N = pieces.sums(heads.A * heads.value_norms(p).double().unsqueeze(1))
    theta = torch.where(sums.visible, w_S + sums.mass / sums.retained * w_N, 0.0)
    L = heads.projected_norms(sums.shift, p)
    columns = {"mass": sums.mass, "value_mass": w_S, "bound": theta}
    if centred:
        # Where one key carries a span, θ_c equals L and rounding alone decides which comes out larger. θ_c is known to
        # be at least L, which has more digits: the larger of the two is the better value of θ_c.
        columns["centred_bound"] = torch.maximum(_centred_bounds(heads, pieces, sums, p), L)
    return columns | {"perturbation": L, "visible": sums.visible, "retained": sums.retained}


def _centred_bounds(heads: Heads, pieces: Pieces, sums: Sums, p: int) -> Tensor:
    """θ_c = Σ_S A_i ‖(V_i − z′) W_O‖, ``[H, Q, P]``, over a list of (key, span) pairs in blocks."""
    theta_c = torch.zeros_like(sums.mass)
    by_group = sums.centre.unflatten(0, (len(heads.values), -1))
    for block in row_blocks(len(pieces.keys), by_group[..., 0, :].nbytes, theta_c.device):
        key, span = pieces.keys[block], pieces.owner[block]
        offsets = heads.values.index_select(1, key)[:, None, None] - by_group.index_select(-2, span)
        rows = offsets.to(heads.w_o.dtype).flatten(0, 1).flatten(1, 2)
        distances = heads.projected_norms(rows, p)
        theta_c.index_add_(-1, span, heads.A[..., key] * distances.view(*heads.A.shape[:2], len(key)))
    return torch.where(sums.visible, theta_c, 0.0)


def _layer_columns(heads: Heads, pieces: Pieces, p: int) -> Columns:
    """‖Σ_h shift_h W_O^h‖ as one product over heads and head width."""
    sums = Sums.of(heads, pieces)
    stacked = sums.shift.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
    L = projected_norms(stacked, heads.w_o.double().flatten(0, 1), p)
    return {"perturbation": L.view(1, *sums.mass.shape[1:]), "visible": sums.visible.any(0, keepdim=True)}


def _batches(spans: list[Span]) -> Iterator[list[Span]]:
    for i in range(0, len(spans), SPANS_AT_ONCE):
        yield spans[i : i + SPANS_AT_ONCE]

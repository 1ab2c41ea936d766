"""All contiguous spans of one length at once, in time linear in the number of keys."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvprobe.errors import PromptError, quote
from kvprobe.spans.inputs import Heads, TraceLike, prepare
from kvprobe.spans.table import tidy
from kvprobe.spans.windows import outside_sums, window_sums
from kvprobe.theory import projected_norms
from kvprobe.theory.checks import check_p

MEASURES = ("mass", "value_mass", "bound", "perturbation", "visible", "retained")


@dataclass(frozen=True)
class AllSpans:
    """Measures of every span [start, start + length), arrays ``[L, H, Q, n − length + 1]`` over starts.

    Columns and conventions are those of :func:`kvprobe.spans.span_stats`: 0 where a span is invisible, NaN in ``bound``
    and ``perturbation`` where it holds all attention. float32, or float64 if the model is; a float32 entry below 1e-38
    may read 0.
    """

    length: int
    p: int
    layers: tuple[int, ...]
    queries: tuple[int, ...]
    mass: np.ndarray
    value_mass: np.ndarray
    bound: np.ndarray
    perturbation: np.ndarray
    visible: np.ndarray
    retained: np.ndarray

    def frame(self) -> pd.DataFrame:
        """Tidy table, one row per layer × head × query × start, in that order."""
        starts = np.arange(self.mass.shape[-1])
        columns = {name: getattr(self, name) for name in MEASURES}
        return tidy(self.layers, self.queries, starts, starts + self.length, columns)


@torch.no_grad()
def all_spans(trace: TraceLike, length: int, *, p: int = 1) -> AllSpans:
    """Mass, value mass, bound and exact perturbation of evicting each span of ``length`` keys.

    R, u_N, w_N are left sum + right sum; a_S, w_S, u_S sums of neighbours; all by additions. Masses are float64, the
    vectors of width d float32 on a float32 model; streamed by layer, head and query, so memory is linear in n.

    Parameters
    ----------
    trace : TraceLike
        Anything with ``n`` and ``layers()``.
    length : int
        Keys in a span, from 1 to n.
    p : {1, 2}
        The norm.

    Returns
    -------
    AllSpans
        Arrays ``[L, H, Q, n − length + 1]`` and ``frame()``.

    Raises
    ------
    PromptError
        A length outside [1, n].
    TheoryError
        p is neither 1 nor 2.

    Notes
    -----
    Derived for kvprobe; Theorem 3.3 of CriticalKV (arXiv 2502.03805) for the bound.
    """
    check_p(p)
    if isinstance(length, bool) or not hasattr(length, "__index__"):
        raise PromptError(f"length is {quote(length)}; allowed: a whole number from 1 to {trace.n}")
    if not 1 <= length <= trace.n:
        raise PromptError(f"length = {length} with n = {trace.n} keys; allowed: 1 to {trace.n}")
    measured: dict[str, list[np.ndarray]] = {name: [] for name in MEASURES}
    layers, queries = [], ()
    for view in trace.layers():
        heads = prepare(view, margin=length - 1)
        for name, values in _measure(heads, length, p).items():
            unseen = heads.total if name == "retained" else 0.0
            measured[name].append(_embed(values, heads, trace.n - length + 1, unseen))
        layers.append(view.index)
        queries = tuple(view.queries.tolist())
    arrays = {name: np.stack(parts) for name, parts in measured.items()}
    return AllSpans(length, p, tuple(layers), queries, **arrays)


def _measure(heads: Heads, length: int, p: int) -> dict[str, Tensor]:
    seen = window_sums(heads.visible.int().unsqueeze(-1), length).squeeze(-1) > 0
    per_key = torch.stack([heads.A, heads.A * heads.value_norms(p).double().unsqueeze(1)], -1)
    mass, w_S = window_sums(per_key, length).unbind(-1)
    retained, w_N = outside_sums(per_key, length).unbind(-1)
    if heads.sink_mass is not None:
        retained = retained + heads.sink_mass.unsqueeze(-1)
    inflation = mass / retained
    return {
        "mass": mass,
        "value_mass": w_S,
        "bound": torch.where(seen, w_S + inflation * w_N, 0.0),
        "perturbation": torch.where(seen, _perturbations(heads, inflation, length, p), 0.0),
        "visible": seen,
        "retained": retained,
    }


def _perturbations(heads: Heads, inflation: Tensor, length: int, p: int) -> Tensor:
    """‖((a_S / R) u_N − u_S) W_O‖_p, ``[H, Q, starts]``; one head and query at a time stay in the cache."""
    A, inflation = heads.A.to(heads.values.dtype), inflation.to(heads.values.dtype)
    L = torch.empty_like(inflation)
    for V, group in zip(heads.values, heads.groups(), strict=True):
        for h in range(group.start, group.stop):
            for q in range(A.shape[1]):
                weighted = A[h, q, :, None] * V
                shift = outside_sums(weighted, length).mul_(inflation[h, q, :, None])
                L[h, q] = projected_norms(shift.sub_(window_sums(weighted, length)), heads.w_o[h], p)
    return L


def _embed(values: Tensor, heads: Heads, n_starts: int, unseen: Tensor | float) -> np.ndarray:
    """Place the starts that were computed among all; the others are spans that no query sees."""
    dtype = torch.bool if values.dtype == torch.bool else heads.values.dtype
    full = torch.empty(*values.shape[:2], n_starts, dtype=dtype)
    full[:] = unseen if isinstance(unseen, float) else unseen.cpu().unsqueeze(-1)
    full[..., heads.first : heads.first + values.shape[-1]] = values.cpu()
    return full.numpy()

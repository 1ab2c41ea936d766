"""An equal blow with other content: vectors of the target's norm, layer by layer and row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvprobe.errors import InterventionError, quote
from kvprobe.placebo.deltas import Delta, deltas
from kvprobe.placebo.keysets import KeySet, key_set, text
from kvprobe.placebo.scope import Indices, PerLayer, Scope
from kvprobe.spans.inputs import TraceLike
from kvprobe.theory.perturbation import norm

LEVELS = ("layer", "head")
RANDOM = "random"


@torch.no_grad()
def injection(
    trace: TraceLike,
    target: Any,
    direction: Any = RANDOM,
    *,
    level: str = "layer",
    layers: Indices = None,
    heads: PerLayer = None,
    p: int = 1,
    after: bool = False,
    seed: int = 0,
) -> dict[int, Tensor]:
    """Vectors to add to each layer's attention output: as large as what removing ``target`` does, pointing elsewhere.

    ``level="layer"``: ‖vector‖_p = L_layer = ‖Σ_h Δo_h‖_p of every row. ``level="head"``: a vector of norm ‖Δo_h‖_p for
    every head, summed over heads.

    Parameters
    ----------
    trace, layers, heads, p, after
        As in :func:`kvprobe.placebo.window_strengths`; with ``after``, rows before the target's last stop get 0.
    target : key set
        What sets the norms.
    direction : key set or "random"
        Whose own Δo gives the direction, row by row; or Gaussian vectors. The target itself gives its own Δo back.
    level : {"layer", "head"}
        What keeps its norm.
    seed : int
        Of the random directions.

    Returns
    -------
    dict of int to Tensor ``[Q, D]``
        One vector a layer and row of the trace; float32, or float64 if the model is.

    Raises
    ------
    PromptError
        Keys that do not fit the trace.
    InterventionError
        An unknown level; layers or heads that the trace does not have; a direction that has no effect of its own in a
        layer and row where the target has one.
    TheoryError
        A set that leaves some row without attention (R = 0); p is neither 1 nor 2.

    Notes
    -----
    Derived for kvprobe.
    """
    if level not in LEVELS:
        raise InterventionError(f"level={quote(level)}; allowed: {', '.join(LEVELS)}")
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or seed < 0:
        raise InterventionError(f"seed={quote(seed)}; allowed: a whole number, at least 0")
    scope = Scope(trace, layers, heads, p, after)
    named = getattr(trace, "spans", None)
    sets = [key_set(target, trace.n, "target", named)]
    if not (isinstance(direction, str) and direction == RANDOM):
        sets.append(key_set(direction, trace.n, "direction", named))
    return {part.layer.index: _vectors(part, sets, level, p, int(seed)) for part in deltas(scope, sets)}


def _vectors(part: Delta, sets: list[KeySet], level: str, p: int, seed: int) -> Tensor:
    """[Q, D] of one layer."""
    own = part.per_head()
    away = own[1] if len(sets) == 2 else _random(own[0], part.layer.index, seed)
    if level == "layer":
        own, away = own.sum(2, keepdim=True), away.sum(1, keepdim=True)
    size, length = norm(own[0], p) * (part.share > 0).unsqueeze(-1), norm(away, p)
    if bool(((length == 0) & (size > 0)).any()):
        q, _ = ((length == 0) & (size > 0)).nonzero()[0].tolist()
        raise InterventionError(
            f"direction {text(sets[-1])} changes nothing in layer {part.layer.index}, row "
            f"{int(part.layer.queries[q])}, where the target does; allowed: keys that row sees, or 'random'"
        )
    unit = away / torch.where(length == 0, 1.0, length).unsqueeze(-1)
    return (size.unsqueeze(-1) * unit).sum(1).to(part.layer.heads.values.dtype)


def _random(like: Tensor, layer: int, seed: int) -> Tensor:
    """Gaussian directions [Q, H, D], a stream of its own for every layer."""
    rng = np.random.default_rng([seed, layer])
    return torch.from_numpy(rng.standard_normal(like.shape)).to(like)

"""From kept sets to tables: L, its bounds and the masses behind them, at the probe row of one document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvprobe import theory
from kvprobe.cells.probing import Probed
from kvprobe.errors import EvictionError
from kvprobe.eviction import Choice, Policy
from kvprobe.eviction.policies import ratio
from kvprobe.eviction.rehearsal import rehearse
from kvprobe.traces import LayerView

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Arm:
    """One policy at one cache size.

    Attributes
    ----------
    policy
        What chooses.
    cache
        Share of the context's entries to keep, as written.
    alpha
        First-stage share behind σ, θ̂ and the relaxed bound; None: the policy's own, 0.5 for one without stages.
    """

    policy: Policy
    cache: str
    alpha: float | None = None


@dataclass(frozen=True)
class Cells:
    """Tables of one or more documents.

    Attributes
    ----------
    heads
        One row a document × arm × layer × query head: ``kept`` (entries of the context), ``mass`` (a_S),
        ``retained`` (R), ``value_mass`` (w_S), ``perturbation`` (L), ``centred_bound`` (θ_c), ``bound`` (θ); with
        stages also ``stage1`` (entries of N′), ``sigma``, ``sigma_oracle`` (mass of the best set of that size),
        ``stage2_bound`` (θ̂), ``relaxed_bound`` and ``relaxed_candidates`` (NaN where σ ≤ ½).
    layers
        One row a document × arm × layer: ``perturbation``, L of the layer's summed change.
    """

    heads: pd.DataFrame
    layers: pd.DataFrame


def measure(
    probed: Probed, arms: Sequence[Arm], *, p: int = 1, stages: bool = False, choices: Sequence[Choice] | None = None
) -> Cells:
    """Every measure of every arm, layer by layer, from the whole cache's own probe row.

    Each layer is taken by itself: its inputs are those of the whole cache, and the evicted entries are missing from it
    alone. What follows the context (the question, and the decoded token itself) is never evicted.

    Parameters
    ----------
    probed
        From :func:`kvprobe.cells.probe`, with the arms' policies.
    arms
        Policy × cache size, each once.
    p
        Norm of L and of the bounds, 1 or 2; a policy's own norm is one of its settings.
    stages
        Also σ, θ̂ and the relaxed bound.
    choices
        What the arms keep, where it is known already (:func:`choose`).
    """
    chosen = choose(probed, arms) if choices is None else choices
    first = [_first_stage(probed, arm) for arm in arms] if stages else None
    heads, layers = [], []
    pad = probed.prompt.pad
    for view in probed.trace.layers():
        row, sink = _row(view, pad)
        keep = _sets([each.keep[view.index] for each in chosen], row)
        stage1 = None if first is None else _sets([each[view.index] for each in first], row)
        found = theory.consequences(row, view.values[:, pad:], view.w_o, keep, stage1=stage1, p=p, sink_mass=sink)
        heads.append(_columns(found, keep, stage1, row, probed.context_stop, sink))
        layers.append(found.layer_perturbation.cpu().numpy())
    return Cells(_frame(probed, arms, heads), _layer_frame(probed, arms, np.stack(layers)))


def choose(probed: Probed, arms: Sequence[Arm]) -> list[Choice]:
    """What each arm keeps of the context."""
    return [arm.policy.choose(probed.measured.scored(arm.policy), arm.cache) for arm in arms]


def noted(arms: Sequence[Arm], choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Facts that policies attach to what they chose (PyramidKV's fallback, …): one entry an arm that has any."""
    return [
        {"policy": arm.policy.name, "cache": float(ratio(arm.cache)), **choice.notes}
        for arm, choice in zip(arms, choices, strict=True)
        if choice.notes
    ]


def refuse(model: Any, n: int, behind: int, arms: Sequence[Arm]) -> None:
    """Refuse arms that cannot be told apart, or done with a context of ``n`` tokens and ``behind`` after it."""
    seen: set[Any] = set()
    for arm in arms:
        key = (arm.policy.name, ratio(arm.cache))
        if key in seen:
            raise EvictionError(
                f"{key[0]} at cache {arm.cache} is given twice; allowed: each once (label=… tells policies apart that "
                "differ in settings only)"
            )
        seen.add(key)
        rehearse(model, [arm.policy], n, arm.cache, future=behind)


def joined(parts: Iterable[Cells]) -> Cells:
    """The tables of several documents as one."""
    import pandas as pd

    found = list(parts)
    return Cells(
        pd.concat([part.heads for part in found], ignore_index=True),
        pd.concat([part.layers for part in found], ignore_index=True),
    )


def _row(view: LayerView, pad: int) -> tuple[Tensor, Tensor | None]:
    """The probe row's attention [H, n] over real tokens in fp64, and each head's learned sink mass."""
    sink = None if view.sink is None else view.sink.double()
    row, mass = theory.attention(view.logits[:, -1, pad:].double(), sink)
    return row, mass


def _first_stage(probed: Probed, arm: Arm) -> Tensor:
    return arm.policy.first_stage(probed.measured.scored(arm.policy), arm.cache, arm.alpha)


def _sets(keep: Sequence[Tensor], row: Tensor) -> Tensor:
    """Kept sets [S, H, n]: those of the context by query head, and everything behind it."""
    n_heads, n = row.shape
    sets = torch.ones(len(keep), n_heads, n, dtype=torch.bool, device=row.device)
    for place, mine in enumerate(keep):
        sets[place, :, : mine.shape[-1]] = mine.to(sets.device).repeat_interleave(n_heads // mine.shape[0], 0)
    return sets


def _columns(
    found: theory.Consequences, keep: Tensor, stage1: Tensor | None, row: Tensor, stop: int, sink: Tensor | None
) -> dict[str, np.ndarray]:
    """Columns [S, H] of one layer, from its kept sets [S, H, n] and rows [H, n]."""
    names = ["mass", "retained", "value_mass", "perturbation", "centred_bound", "bound"]
    columns = {"kept": keep[..., :stop].sum(-1)} | {name: getattr(found, name) for name in names}
    if stage1 is not None:
        size = stage1[..., :stop].sum(-1)
        columns |= {"stage1": size, "sigma": found.sigma, "sigma_oracle": _best_mass(row, stop, size, sink)}
        columns |= {name: getattr(found, name) for name in ("stage2_bound", "relaxed_bound", "relaxed_candidates")}
    return {name: value.cpu().numpy() for name, value in columns.items()}


def _best_mass(row: Tensor, stop: int, size: Tensor, sink: Tensor | None) -> Tensor:
    """Most mass that any first stage of this size [S, H] has at this row, with what is never evicted: [S, H]."""
    never = row[:, stop:].sum(-1) if sink is None else row[:, stop:].sum(-1) + sink
    best = row[:, :stop].sort(-1, descending=True).values.cumsum(-1).expand(len(size), -1, -1)
    return torch.where(size > 0, best.gather(-1, (size - 1).clamp(min=0)[..., None])[..., 0], 0.0) + never


def _frame(probed: Probed, arms: Sequence[Arm], layers: Sequence[dict[str, np.ndarray]]) -> pd.DataFrame:
    """One row an arm × layer × head, in that order."""
    import pandas as pd

    columns = {name: np.stack([layer[name] for layer in layers], 1) for name in layers[0]}  # [S, L, H]
    S, L, H = columns["mass"].shape
    index = _index(probed, arms, L * H)
    index |= {"layer": np.tile(np.repeat(np.arange(L), H), S), "head": np.tile(np.arange(H), S * L)}
    return pd.DataFrame(index | {name: values.ravel() for name, values in columns.items()})


def _layer_frame(probed: Probed, arms: Sequence[Arm], L: np.ndarray) -> pd.DataFrame:
    """One row an arm × layer from values [L, S]."""
    import pandas as pd

    index = _index(probed, arms, len(L)) | {"layer": np.tile(np.arange(len(L)), len(arms))}
    return pd.DataFrame(index | {"perturbation": L.T.ravel()})


def _index(probed: Probed, arms: Sequence[Arm], each: int) -> dict[str, Any]:
    names = np.array([arm.policy.name for arm in arms], dtype=object)
    return {
        "doc": probed.document.name,
        "policy": np.repeat(names, each),
        "cache": np.repeat([float(ratio(arm.cache)) for arm in arms], each),
    }

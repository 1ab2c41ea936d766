"""The first-layer rule: layers whose heads attend too diffusely to select from, decided and stored before a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprobe.errors import TaskError, quote
from kvprobe.eviction.policies import ratio
from kvprobe.sources import EMBEDDED

Array = NDArray[np.float64]
MEASURES = ("entropy", "relative_entropy", "top_mass")
SCHEMA = "kvprobe-layer-rule/1"
ROWS_BYTES = 64 << 20
"""Attention rows that are looked at together."""


@dataclass(frozen=True)
class Rule:
    """When a layer is left out of head averages.

    A row at which n keys lie (itself counted) keeps b = ⌊cache · n⌋ of them, and selects ⌊alpha · b⌋ of those by
    attention alone. Assumption 3.4 of CriticalKV says that these hold more than half of the attention; its Fig. 8 finds
    exceptions among first-layer heads only.

    Attributes
    ----------
    cache, alpha
        Share of the cache that is kept, and of that by attention alone.
    mass
        A head fails if a row's own top ⌊alpha · b⌋ keys hold at most this share of it (mean over rows and items).
    share
        A layer is diffuse if at least this share of its heads fail.
    leading
        Exclude an unbroken run of diffuse layers from layer 0 only; False: every diffuse layer.
    """

    cache: float = 0.2
    alpha: float = 0.5
    mass: float = 0.5
    share: float = 0.5
    leading: bool = True

    def __post_init__(self) -> None:
        for name in ("cache", "alpha", "mass", "share"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise TaskError(f"{name} is {quote(value)}, must be a number above 0 and at most 1")
        if not isinstance(self.leading, bool):
            raise TaskError(f"leading is {quote(self.leading)}, must be True or False")

    def stage1(self, n: int) -> int:
        """⌊alpha · ⌊cache · n⌋⌋, exactly as the shares are written."""
        return int(Fraction(str(self.alpha)) * int(ratio(self.cache) * n))

    @property
    def text(self) -> str:
        """The rule in words."""
        where = "in an unbroken run from layer 0" if self.leading else "wherever they are"
        return (
            f"layers in which {self.share:.0%} or more of the heads hold at most {self.mass:g} of their attention on "
            f"their own top ⌊{self.alpha:g}·⌊{self.cache:g} n⌋⌋ keys, {where}"
        )


@torch.no_grad()
def measure(trace: Any, rule: Rule | None = None) -> dict[str, Any]:
    """How diffuse every head of a trace attends.

    Parameters
    ----------
    trace : Trace
        Of a clean run; all its rows count alike.

    Returns
    -------
    dict
        ``entropy`` [L, H] in nats, a learned sink counted as one more key; ``relative_entropy``, the same over
        ln(visible keys), without rows that see one key only; ``top_mass``, the share of a row's own top ⌊alpha · b⌋
        keys: all means over rows, float64. ``n`` columns, ``n_rows`` rows, ``n_judged`` rows with ⌊alpha · b⌋ ≥ 1: the
        others are left out of ``top_mass``.

    Raises
    ------
    TaskError
        No row is long enough to be judged.

    Notes
    -----
    Rows are worked through a few at a time: memory does not grow with their number.
    """
    rule = Rule() if rule is None else rule
    sizes = torch.tensor([rule.stage1(query - trace.pad + 1) for query in trace.queries])
    if not bool((sizes > 0).any()):
        raise TaskError(
            f"no row of the trace has ⌊{rule.alpha:g}·⌊{rule.cache:g} n⌋⌋ ≥ 1 keys to select (the longest sees "
            f"{trace.queries[-1] - trace.pad + 1}): allowed are longer prompts or a larger cache"
        )
    layers = [_layer(trace, index, sizes) for index in range(trace.n_layers)]
    found: dict[str, Any] = {name: np.stack([layer[place] for layer in layers]) for place, name in enumerate(MEASURES)}
    return found | {"n": trace.n, "n_rows": len(sizes), "n_judged": int((sizes > 0).sum())}


def _layer(trace: Any, index: int, sizes: Tensor) -> list[Array]:
    """The three measures of one layer, each [H]; NaN where no row has one."""
    step = max(1, ROWS_BYTES // (8 * trace.n_heads * trace.n))
    sums = torch.zeros(len(MEASURES), trace.n_heads, dtype=torch.float64)
    counts = torch.zeros(len(MEASURES), dtype=torch.float64)
    for start in range(0, len(sizes), step):
        rows = slice(start, start + step)
        view = trace.layer(index, rows=rows)
        A, sink = view.rows()
        entropy = _entropy(A, sink)
        seen = (view.logits[0] > -torch.inf).sum(-1) + (sink is not None)
        top = _top_mass(A, sizes[rows].to(A.device))
        spread = seen > 1
        parts = entropy, entropy[:, spread] / seen[spread].double().log(), top
        sums += torch.stack([part.sum(-1).cpu() for part in parts])
        counts += torch.tensor([part.shape[-1] for part in parts])
    return list((sums / counts[:, None]).numpy())


def _entropy(A: Tensor, sink: Tensor | None) -> Tensor:
    """−Σ a ln a over keys and learned sink, [H, Q] float64."""
    found = torch.special.entr(A.double()).sum(-1)
    return found if sink is None else found + torch.special.entr(sink.double())


def _top_mass(A: Tensor, sizes: Tensor) -> Tensor:
    """Mass of each row's own top keys, [H, judged rows] float64; ``sizes`` [Q] says how many (0: not judged)."""
    judged = sizes > 0
    if not bool(judged.any()):
        return A.new_zeros(len(A), 0, dtype=torch.float64)
    best = A[:, judged].topk(int(sizes.max()), -1).values.double().cumsum(-1)
    return best.gather(-1, (sizes[judged] - 1)[None, :, None].expand(len(A), -1, 1))[..., 0]


def decide(measures: Sequence[Mapping[str, Any]], rule: Rule | None = None) -> dict[str, Any]:
    """What the rule excludes, from the measures of several items (:func:`measure`).

    Returns
    -------
    dict
        Plain values. ``excluded`` layers; ``layers``: one dict a layer with its means, ``top_mass_min``, ``failing``
        heads, ``diffuse``, ``excluded`` and ``why``; ``failing_heads`` [[layer, head, mass]], and how many of them are
        outside excluded layers (``n_failing_elsewhere``); ``heads_passing``, share of all heads; the measures [L, H]
        as means over items; ``rule, rule_text, n_items``.

    Raises
    ------
    TaskError
        No measures, or of different models.
    """
    rule = Rule() if rule is None else rule
    means = _means(measures)
    top = means["top_mass"]
    fails = top <= rule.mass
    diffuse = fails.mean(-1) >= rule.share
    excluded = _excluded(diffuse, rule)
    layers = [_of_layer(layer, means, fails, bool(diffuse[layer]), excluded, rule) for layer in range(len(top))]
    elsewhere = np.delete(fails, excluded, axis=0)
    return {
        "excluded": excluded,
        "layers": layers,
        "failing_heads": [[int(i), int(j), float(top[i, j])] for i, j in np.argwhere(fails)],
        "n_failing_elsewhere": int(elsewhere.sum()),
        "heads_passing": float(1 - fails.mean()),
        **{name: table.tolist() for name, table in means.items()},
        "rule": asdict(rule),
        "rule_text": rule.text,
        "n_items": len(measures),
    }


def _means(measures: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    if not measures:
        raise TaskError("no measures to decide from: give those of at least one item")
    tables = {name: [np.asarray(each[name], dtype=np.float64) for each in measures] for name in MEASURES}
    shapes = sorted({table.shape for some in tables.values() for table in some})
    if len(shapes) > 1 or len(shapes[0]) != 2:
        raise TaskError(f"measures have the shapes {quote(shapes)}, must all be [layers, heads] of one model")
    if not all(np.isfinite(table).all() for table in tables["top_mass"]):
        raise TaskError("top_mass has values that are not finite, must be a share in [0, 1] for every head")
    return {name: np.mean(some, axis=0) for name, some in tables.items()}


def _excluded(diffuse: NDArray[np.bool_], rule: Rule) -> list[int]:
    """All diffuse layers, or those before the first that is not."""
    stop = len(diffuse) if diffuse.all() else int(np.argmin(diffuse))
    return list(range(stop)) if rule.leading else [int(layer) for layer in np.flatnonzero(diffuse)]


def _of_layer(
    layer: int, means: Mapping[str, Array], fails: NDArray[np.bool_], diffuse: bool, excluded: Sequence[int], rule: Rule
) -> dict[str, Any]:
    failing = [int(head) for head in np.flatnonzero(fails[layer])]
    count = f"{len(failing)} of {fails.shape[1]} heads hold at most {rule.mass:g} of their attention on their top keys"
    needed = f"{math.ceil(Fraction(str(rule.share)) * fails.shape[1])} needed"
    if layer in excluded:
        why = f"{count}: excluded"
    elif diffuse:
        why = f"{count}, but layer {len(excluded)} before it stays: kept"
    else:
        why = f"{count}, {needed}: kept"
    row: dict[str, Any] = {"layer": layer} | {name: float(table[layer].mean()) for name, table in means.items()}
    row["top_mass_min"] = float(means["top_mass"][layer].min())
    return row | {"failing": failing, "diffuse": diffuse, "excluded": layer in excluded, "why": why}


def content(report: Mapping[str, Any], model: Any, **facts: Any) -> dict[str, Any]:
    """What a stored rule says: the report of :func:`decide`, the model's name, and any other facts."""
    return {"schema": SCHEMA, "model": named(model)} | facts | dict(report)


def named(model: Any) -> str:
    """A model's name as ``load`` gives it: of a loaded model, or of what ``load`` would be called with."""
    text = str(getattr(model, "name", model))
    if text.lower() in EMBEDDED:
        return EMBEDDED[0]
    return Path(text).resolve().name if Path(text).is_dir() else text

"""How well attention and values alone recover a label that needed hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvprobe.errors import PromptError
from kvprobe.sinks.checks import instance
from kvprobe.sinks.scores import Array, Scores
from kvprobe.sinks.secondary import Flags, Secondary
from kvprobe.stats import auroc

LABELS = {
    "all_four": ("high", "persistent", "aligned", "outlying"),
    "without_high": ("persistent", "aligned", "outlying"),
    "residual_only": ("aligned", "outlying"),
}
NOTE = (
    "'high' is a condition on s itself, and 'persistent' another on the same attention: part of what s recovers of "
    "all_four and without_high is circular; residual_only has neither. 'aligned' fixes the direction of the state and, "
    "behind a norm, the value: part of what m and the ratio recover follows from it"
)


def recovery(secondary: Secondary, scores: Scores, layers: Sequence[int] | None = None) -> dict[str, Any]:
    """AUROC of low ρ, high s and low m for the secondary-sink label, within each layer, mean over layers.

    P(score of a labelled key > score of another candidate), ties ½, among the layer's candidates with Σ A > 0. Scores:
    ``ratio`` −ρ pooled over the layer's heads, ``relative_ratio`` the same with m over its head's median, ``mass`` the
    mean of s over heads, ``norm`` −(mean of m over heads).

    Parameters
    ----------
    secondary, scores
        Labels and scores of one prompt.
    layers
        Layers that count; all by default.

    Returns
    -------
    dict
        Label (``all_four``, ``without_high``, ``residual_only``) → ``auroc`` by score (None where no layer has both
        classes), ``by_layer`` (None where the layer lacks a class), ``n_layers``, ``n_positive`` and ``n_negative``
        (layer × key pairs of those layers); and a ``note`` on what is circular.

    Raises
    ------
    PromptError
        Scores and labels of different layers or keys.
    TheoryError
        Layers that the scores do not have.
    """
    instance(secondary, Secondary, "secondary", "what secondary_sinks returns")
    instance(scores, Scores, "scores", "what sinks.scores returns")
    if secondary.label.shape != scores.seen.shape:
        raise PromptError(
            f"labels of {secondary.label.shape} layers × keys; allowed: those of the scores, {scores.seen.shape}"
        )
    found = {
        "ratio": -scores.ratio("layer"),
        "relative_ratio": -scores.ratio("layer", relative=True),
        "mass": scores.pooled("mass", "layer"),
        "norm": -scores.pooled("norm", "layer"),
    }
    counted = np.isin(np.arange(len(scores.mass)), scores.chosen(layers))[:, None]
    usable = secondary.candidates & counted & np.logical_and.reduce([~np.isnan(table) for table in found.values()])
    labels = {name: secondary.meets(*conditions) for name, conditions in LABELS.items()}
    return {name: _one(found, usable & label, usable & ~label) for name, label in labels.items()} | {"note": NOTE}


def _one(found: dict[str, Array], positive: Flags, negative: Flags) -> dict[str, Any]:
    both = np.flatnonzero(positive.any(1) & negative.any(1))
    by_layer: dict[str, list[float | None]] = {}
    for name, table in found.items():
        by_layer[name] = [None] * len(positive)
        for layer in both:
            by_layer[name][layer] = auroc(table[layer, positive[layer]], table[layer, negative[layer]])
    means = {
        name: float(np.mean([value for value in values if value is not None])) if both.size else None
        for name, values in by_layer.items()
    }
    counts = {"n_layers": int(both.size), "n_positive": int(positive.sum()), "n_negative": int(negative.sum())}
    return {"auroc": means, "by_layer": by_layer, **counts}

"""From probed items to numbers: within-item AUROC, the gate, the effect of cutting each kind of span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvprobe import stats
from kvprobe.needles.probe import ItemProbe
from kvprobe.needles.settings import FEATURES, Settings

CONTRASTS = {"vs_hard": ("hard", "decoy"), "vs_distractor": ("distractor",)}
GATE = {"hard": "vs_hard", "distractor": "vs_distractor"}
ARMS = ("evidence", "hard", "decoy", "distractor")

Array = NDArray[np.float64]


def summarise(probes: Sequence[ItemProbe], settings: Settings) -> dict[str, Any]:
    """All numbers of a run as plain values (see the README for each key)."""
    return {
        "accuracy": float(np.mean([probe.clean.score for probe in probes])),
        "auroc": {name: contrast(probes, name, "last", settings) for name in CONTRASTS},
        "auroc_answer": {name: contrast(probes, name, "answer", settings) for name in CONTRASTS},
        "gate": gate(probes, settings, settings.gate_at),
        "gate_answer": gate(probes, settings, "answer"),
        "ablation": ablation(probes, settings.seed),
        **needles(probes),
    }


def head_auroc(probe: ItemProbe, feature: str, name: str, where: str) -> Array | None:
    """Within-item AUROC of evidence against a contrast, [L, H]; the mean over answer tokens for ``where='answer'``.

    None where the item has no span of the contrast. A head with an undefined feature (R = 0) is NaN.
    """
    positive, negative = probe.is_label("evidence"), probe.is_label(*CONTRASTS[name])
    if not negative.any():
        return None
    values = [_auroc(probe.features[feature][:, :, q], positive, negative) for q in observation_points(probe, where)]
    return np.mean(values, axis=0)


def _auroc(values: Array, positive: NDArray[np.bool_], negative: NDArray[np.bool_]) -> Array:
    """[L, H, S] → [L, H]."""
    columns = np.moveaxis(values, -1, 0).reshape(values.shape[-1], -1)
    whole = np.isfinite(columns).all(axis=0)
    result = np.full(columns.shape[1], np.nan)
    result[whole] = stats.auroc_many(columns[positive][:, whole], columns[negative][:, whole])
    return result.reshape(values.shape[:2])


def observation_points(probe: ItemProbe, where: str) -> list[int]:
    """Indices of the observation points: the last prompt token, or all answer tokens."""
    return [q for q, name in enumerate(probe.where) if name == where or name.startswith(f"{where}_")]


def kept_layers(probe: ItemProbe, settings: Settings) -> list[int]:
    """Layers that the rule stated before the run leaves in."""
    n_layers = probe.features["mass"].shape[0]
    return [layer for layer in range(n_layers) if layer not in settings.exclude_layers]


def contrast(probes: Sequence[ItemProbe], name: str, where: str, settings: Settings) -> dict[str, Any] | None:
    """Feature → mean within-item AUROC over heads and items, its interval, and heads at 1.0 in every item."""
    result = {}
    for feature in FEATURES:
        maps = [auroc for probe in probes if (auroc := head_auroc(probe, feature, name, where)) is not None]
        if not maps:
            return None
        kept = np.stack(maps)[:, kept_layers(probes[0], settings)]
        interval = stats.auroc_interval(np.nanmean(kept, axis=(1, 2)), seed=settings.seed)
        result[feature] = {
            "mean": interval.mean,
            "ci_low": interval.low,
            "ci_high": interval.high,
            "ci_method": interval.method,
            "heads_at_1": int((kept == 1.0).all(axis=0).sum()),
            "n_heads": int(kept[0].size),
            "n_items": len(maps),
        }
    return result


def gate(probes: Sequence[ItemProbe], settings: Settings, where: str) -> dict[str, Any]:
    """Is the evidence attended to more than what it is compared with? One score a span, one AUROC an item.

    ``track_A``: mean ≥ threshold and p < 0.05; ``undecided``: the interval straddles the threshold; else ``track_B``.
    Where all items agree there is no interval of the mean (the one printed is of the share of items at that value): the
    mean and p decide alone, so that a perfect score is never worse off than an almost perfect one.
    ``not_content``: the distractors come from a noise haystack, where masking them changes nothing.
    """
    name = GATE[settings.gate_contrast]
    scores, targets = _span_scores(probes, name, where, settings)
    values = [float(stats.auroc(score[target], score[~target])) for score, target in zip(scores, targets, strict=True)]
    about = {
        "contrast": settings.gate_contrast,
        "threshold": settings.gate_threshold,
        "score": settings.gate_score,
        "at": where,
        "reduction": "sum over layers and heads",
        "exclude_layers": list(settings.exclude_layers),
    }
    empty = {"value": None, "ci_low": None, "ci_high": None, "p_permutation": None, "p_attainable": None, "n": 0}
    if not values:
        return about | empty | {"verdict": "no_contrast"}
    interval = stats.auroc_interval(values, seed=settings.seed)
    test = stats.permutation_within_item(scores, targets, statistic="auroc", seed=settings.seed)
    noise = settings.gate_contrast == "distractor" and probes[0].item.settings["haystack"] == "noise"
    verdict = "not_content" if noise else _verdict(interval, test.p, settings.gate_threshold)
    about["degenerate"] = interval.degenerate
    numbers = {"value": interval.mean, "ci_low": interval.low, "ci_high": interval.high, "ci_method": interval.method}
    tested = {"p_permutation": test.p, "p_attainable": test.p_attainable, "n": interval.n, "verdict": verdict}
    return about | numbers | tested | {"cannot_reject": stats.cannot_reject(test.p_attainable)}


def _verdict(interval: stats.Interval, p: float, threshold: float) -> str:
    if interval.degenerate and interval.n > 1:
        if interval.mean < threshold:
            return "track_B"
        return "track_A" if p < 0.05 else "undecided"
    if not (interval.low >= threshold or interval.high < threshold):
        return "undecided"  # an interval that is not defined (one item) straddles, too
    return "track_A" if interval.mean >= threshold and p < 0.05 else "track_B"


def _span_scores(
    probes: Sequence[ItemProbe], name: str, where: str, settings: Settings
) -> tuple[list[Array], list[NDArray[np.bool_]]]:
    """Per item: attention to each span of the contrast, summed over layers and heads, mean over observation points."""
    scores, targets = [], []
    for probe in probes:
        chosen = probe.is_label("evidence", *CONTRASTS[name])
        target = probe.is_label("evidence")[chosen]
        if target.all():
            continue
        values = probe.features[settings.gate_score][kept_layers(probe, settings)][
            :, :, observation_points(probe, where)
        ][..., chosen]
        scores.append(values.sum(axis=(0, 1)).mean(axis=0))
        targets.append(target)
    return scores, targets


def ablation(probes: Sequence[ItemProbe], seed: int) -> dict[str, Any]:
    """Kind of span → mean effect of masking one (all evidence at once), first within items, then over them."""
    result: dict[str, Any] = {label: _effect(probes, label, seed) for label in ARMS}
    result["evidence"]["delta_attention"] = {
        bucket: {reading: float(np.mean([probe.shift[bucket][reading] for probe in probes])) for reading in readings}
        for bucket, readings in probes[0].shift.items()
    }
    result["contrast"] = _paired(probes, seed)
    return result


def _effect(probes: Sequence[ItemProbe], label: str, seed: int) -> dict[str, Any] | None:
    groups = [[arm for arm in probe.arms if arm.label == label] for probe in probes]
    groups = [group for group in groups if group]
    if not groups:
        return None
    means = {
        key: [float(np.mean([getattr(arm, field) for arm in group])) for group in groups]
        for key, field in (("delta_logprob", "delta_logprob"), ("kl", "kl"), ("accuracy", "score"))
    }
    interval = stats.mean_interval(means["delta_logprob"], seed=seed)
    spread = {
        "ci_low": interval.low,
        "ci_high": interval.high,
        "n_items": len(groups),
        "n_spans": sum(map(len, groups)),
    }
    return {key: float(np.mean(values)) for key, values in means.items()} | spread


def _paired(probes: Sequence[ItemProbe], seed: int) -> dict[str, Any]:
    """Evidence arm − mean of all other arms of the item: interval, and permutation of the target label within item."""
    scores = [np.array([arm.delta_logprob for arm in probe.arms[1:]]) for probe in probes]
    targets = [np.array([arm.label == "evidence" for arm in probe.arms[1:]]) for probe in probes]
    usable = [i for i, target in enumerate(targets) if not target.all()]
    if not usable:
        return {
            "delta_logprob": None,
            "ci_low": None,
            "ci_high": None,
            "p_permutation": None,
            "p_attainable": None,
            "n": 0,
        }
    scores, targets = [scores[i] for i in usable], [targets[i] for i in usable]
    gaps = [float(score[target].mean() - score[~target].mean()) for score, target in zip(scores, targets, strict=True)]
    interval = stats.mean_interval(gaps, seed=seed)
    test = stats.permutation_within_item(scores, targets, seed=seed)
    return {
        "delta_logprob": interval.mean,
        "ci_low": interval.low,
        "ci_high": interval.high,
        "p_permutation": test.p,
        "p_attainable": test.p_attainable,
        "n": interval.n,
    }


def needles(probes: Sequence[ItemProbe]) -> dict[str, Any]:
    """Share of the evidence mass on each asked needle at the answer tokens, and the entropy of the shares in nats."""
    shares = []
    for probe in probes:
        mass = probe.features["mass"][:, :, observation_points(probe, "answer")][..., probe.is_label("evidence")]
        total = mass.sum(axis=(0, 1, 2))
        shares.append(total / total.sum())
    mean = np.mean(shares, axis=0)
    entropies = [float(-(share * np.log(np.where(share > 0, share, 1))).sum()) for share in shares]
    return {
        "needles": [{"needle": k, "share": float(share), "n": len(probes)} for k, share in enumerate(mean)],
        "entropy": float(np.mean(entropies)),
    }

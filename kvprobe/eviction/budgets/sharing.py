"""What budgets have in common: who may hold how much, a top-k over several sets, and exact shares."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import EvictionError
from kvprobe.eviction.budgets.base import Request


def present_counts(request: Request) -> Int[Tensor, "L J"]:
    """Entries that each set has, on the device of the first layer."""
    return _stacked(request, [(scores > -torch.inf).sum(-1) for scores in request.scores])


def reserved_counts(request: Request) -> Int[Tensor, "L J"]:
    """Entries that each set keeps whatever their score, on the device of the first layer."""
    pairs = zip(request.scores, request.reserved, strict=True)
    return _stacked(request, [(reserved & (scores > -torch.inf)).sum(-1) for scores, reserved in pairs])


def free_scores(request: Request) -> list[Float[Tensor, "J n"]]:
    """Per layer, the scores of what is not reserved; the others are −∞."""
    pairs = zip(request.scores, request.reserved, strict=True)
    return [scores.masked_fill(reserved, -torch.inf) for scores, reserved in pairs]


def _stacked(request: Request, counts: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.to(request.scores[0].device) for each in counts])


def check_total(total: int, least: int, most: int, where: str, name: str) -> None:
    """Refuse a total that is less than what must stay, or more than what is there."""
    if not least <= total <= most:
        raise EvictionError(
            f"{name}: {total} entries to share over {where}, which must keep {least} and hold {most}; "
            f"allowed: {least} to {most}"
        )


def best_counts(layers: Sequence[Float[Tensor, "J n"]], places: int) -> Int[Tensor, "layers J"]:
    """How many of the ``places`` best scores belong to each row, ties by (layer, row, position); −∞ is no candidate.

    Equals a stable descending sort of everything, cut at ``places``; only the cut itself is looked for.
    """
    flat = torch.cat([each.flatten().to(layers[0].device) for each in layers])
    if not places:
        return torch.zeros(len(layers), len(layers[0]), dtype=torch.long, device=flat.device)
    cut = flat.kthvalue(flat.numel() - places + 1).values
    above = _row_counts(flat > cut, layers)
    tied = _row_counts((flat == cut) & (flat > -torch.inf), layers)
    left = places - above.sum() - (tied.cumsum(0) - tied)  # what earlier rows leave of the places at the cut
    return (above + torch.minimum(left.clamp(min=0), tied)).unflatten(0, (len(layers), -1))


def _row_counts(flags: Tensor, layers: Sequence[Tensor]) -> Tensor:
    parts = flags.split([each.numel() for each in layers])
    return torch.cat([part.view(each.shape).sum(-1) for part, each in zip(parts, layers, strict=True)])


def water_fill(start: Sequence[int], weights: Sequence[int], upper: Sequence[int], total: int) -> list[int]:
    """min(upper_i, start_i + λ·weight_i), with the one λ ≥ 0 that makes the sum ``total``, in whole numbers.

    What a full set cannot take goes to the others by their weights; where all that have weight are full, to the rest
    in equal parts. Shares are rounded by the largest remainder, ties by order; nothing here is a float.

    Parameters
    ----------
    start, weights, upper
        Whole numbers ≥ 0, one a set.
    total
        Between Σ min(start, upper) and Σ upper.
    """
    held = [min(pair) for pair in zip(start, upper, strict=True)]
    spare = total - sum(held)
    room = [most - each for most, each in zip(upper, held, strict=True)]
    unfilled = sorted((i for i, w in enumerate(weights) if w and room[i]), key=lambda i: Fraction(room[i], weights[i]))
    weight = sum(weights[i] for i in unfilled)
    full = 0
    for i in unfilled:
        if spare * weights[i] <= room[i] * weight:
            break
        held[i], spare, weight, full = upper[i], spare - room[i], weight - weights[i], full + 1
    if full < len(unfilled):
        return _rounded(held, {i: weights[i] * spare for i in sorted(unfilled[full:])}, weight, spare)
    return water_fill(held, [1] * len(held), upper, total) if spare else held


def _rounded(held: list[int], parts: dict[int, int], denominator: int, spare: int) -> list[int]:
    """Add the fractions ``parts[i] / denominator``, which sum to ``spare``, by the largest remainder."""
    result = list(held)
    for i, part in parts.items():
        result[i] += part // denominator
    left = spare - sum(part // denominator for part in parts.values())
    for i in sorted(parts, key=lambda i: -(parts[i] % denominator))[:left]:
        result[i] += 1
    return result


def exact(value: Any) -> Fraction | None:
    """A number as it is written (0.1 means one tenth), or None where it is none."""
    if isinstance(value, bool):
        return None
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        return None

"""What callers hand to prefill, observe and intervene, made definite; a mistake is one line with what is allowed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvprobe.errors import InterventionError, ModelError, PromptError, quote
from kvprobe.interventions.plan import Intervention
from kvprobe.prompts import Prompt


def real_ids(model: Any, prompt: Any) -> Tensor:
    """The prompt's ids [n] without left pads, on the model's device."""
    if not hasattr(model, "twin"):
        raise ModelError(f"{quote(model)} is not a loaded model: allowed is what kvprobe.load(…) returns")
    if not hasattr(prompt, "ids"):
        raise PromptError(f"{quote(prompt)} is not a prompt: allowed is a Prompt (Prompt.from_text, Prompt.from_ids)")
    ids = prompt.ids[prompt.pad :].to(model.device)
    check_length(model, len(ids))
    check_vocabulary(model, ids)
    return ids


def check_length(model: Any, length: int) -> None:
    """Refuse more tokens than the model's context holds."""
    if model.max_length is not None and length > model.max_length:
        raise PromptError(f"{length} tokens do not fit the model's context of {model.max_length}")


def check_vocabulary(model: Any, ids: Tensor) -> None:
    """Refuse ids that the embedding does not have."""
    last = model.geometry.vocab - 1
    if len(ids) and int(ids.max()) > last:
        raise PromptError(f"token id {int(ids.max())} is outside the model's vocabulary 0 … {last}")


def continuation(model: Any, ids: Sequence[int] | Tensor | None) -> Tensor:
    """Token ids to force after the prompt, [c] on the model's device; none for None or an empty list."""
    if ids is None or (isinstance(ids, Sequence) and not ids) or (isinstance(ids, Tensor) and ids.numel() == 0):
        return torch.zeros(0, dtype=torch.int64, device=model.device)
    try:
        forced = Prompt.from_ids(ids).ids.to(model.device)
    except PromptError as error:
        raise PromptError(f"continuation {quote(ids)}: {error}") from None
    check_vocabulary(model, forced)
    return forced


def positions(queries: Any, n: int, pad: int) -> list[int]:
    """Absolute, sorted, unique positions from an int, a list or a slice; pads are not queries."""
    if isinstance(queries, slice):
        found = sorted(q for q in range(*queries.indices(n)) if q >= pad)
    else:
        found = sorted({q + n if q < 0 else q for q in _integers(queries)})
    if not found or found[0] < pad or found[-1] >= n:
        raise PromptError(f"queries {quote(queries)} do not lie in the prompt: allowed positions are {pad} … {n - 1}")
    return found


def _integers(queries: Any) -> list[int]:
    try:
        return [operator.index(queries)]
    except TypeError:
        pass
    try:
        return [operator.index(query) for query in queries]
    except TypeError:
        raise PromptError(f"queries {quote(queries)}: allowed are an integer, a list of integers, or a slice") from None


def arms(given: Any) -> tuple[bool, list[tuple[Intervention, ...]]]:
    """Whether one intervention was given bare, and all arms as tuples of interventions."""
    if hasattr(given, "cuts") and not isinstance(given, type):
        return True, [(given,)]
    if not isinstance(given, Sequence) or not given:
        raise InterventionError(f"arms must be an intervention or a non-empty list of them, not {quote(given)}")
    groups = [tuple(arm) if isinstance(arm, (list, tuple)) else (arm,) for arm in given]
    for part in (part for group in groups for part in group):
        if not hasattr(part, "cuts") or isinstance(part, type):
            raise InterventionError(
                f"{quote(part)} is not an intervention: allowed are KVMask, ValueGate, KVPatch, ResidualAblation, "
                "Inject and tuples of them, one an arm"
            )
    return False, groups


def count(name: str, value: Any, low: int, high: int | None = None) -> int:
    """A whole number within bounds."""
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        allowed = f"{low} or more" if high is None else f"{low} … {high}"
        raise InterventionError(f"{name}={quote(value)} is not allowed: give a whole number, {allowed}")
    return operator.index(value)


def words(text: str) -> tuple[str, ...]:
    """The words of a comma-separated list, as command lines give it."""
    return tuple(word.strip() for word in text.split(",") if word.strip())

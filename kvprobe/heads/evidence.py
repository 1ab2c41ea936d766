"""The evidence of an item as masks of single heads take it: its spans, its rows, and one head's mask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvprobe import runs
from kvprobe.errors import TaskError, quote
from kvprobe.interventions import KVMask
from kvprobe.tasks.items import Item

Span = tuple[int, int]
Head = tuple[int, int]


def evidence(item: Any) -> list[Span]:
    """The item's evidence; an item without evidence or answer is refused.

    Raises
    ------
    TaskError
        What was given cannot be masked, or has no answer that a mask could change.
    """
    if not isinstance(item, Item):
        raise TaskError(f"{quote(item)} is no item; allowed: what kvprobe.tasks.make(…) returns")
    lacking = [
        name for name, has in (("evidence", item.spans.get("evidence")), ("answer tokens", item.answer_ids)) if not has
    ]
    if lacking:
        raise TaskError(f"the item of {item.task} has no {lacking[0]}; allowed: items with evidence and an answer")
    return list(item.spans["evidence"])


def rows(item: Item) -> list[int]:
    """The query rows that a mask touches: question and teacher-forced answer."""
    return list(range(item.context_stop, len(item.prompt) + len(item.answer_ids)))


def masked(spans: Sequence[Span], heads: Iterable[Head], name: str | None = None) -> KVMask:
    """The mask that takes ``spans`` from the question's and answer's rows in these (layer, head) pairs alone."""
    return KVMask(list(spans), heads=by_layer(heads), queries="suffix", name=name)


def by_layer(heads: Iterable[Head]) -> dict[int, list[int]]:
    """layer → its heads, both in order."""
    found: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        found.setdefault(layer, []).append(head)
    return found


def forced(model: Any, item: Item, arms: Sequence[Any], prefix: Any) -> list[Any]:
    """Outcomes of arms over one prefix, with the logits of the rows that predict the answer (and of the one behind)."""
    options: Mapping[str, Any] = {"suffix": len(item.prompt) - item.context_stop, "continuation": item.answer_ids}
    more: Mapping[str, Any] = {"prefix": prefix, "logits": "continuation", "keep_trace": False}
    found: list[Any] = runs.intervene(model, item.prompt, list(arms), **options, **more)
    return found


def context(model: Any, item: Item) -> Any:
    """The prefilled context of an item: everything before its question."""
    return runs.prefill(model, item.prompt, item.context_stop - item.prompt.pad)

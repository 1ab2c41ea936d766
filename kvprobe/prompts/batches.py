"""Padded batches as tokenizers give them, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.errors import PromptError, quote


def rows(encoded: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """(ids, attention mask) of every row, without what is padded on the right: no query sees it.

    Raises
    ------
    PromptError
        Without ids or a mask, or with parts of different sizes. A mask is needed: an id tells no padding.
    """
    ids, masks = _part(encoded, "input_ids"), _part(encoded, "attention_mask")
    if [len(row) for row in ids] != [len(mask) for mask in masks]:
        raise PromptError(
            f"input_ids have rows of {quote([len(row) for row in ids])} ids, attention_mask of "
            f"{quote([len(mask) for mask in masks])} values; allowed: the same"
        )
    pairs = []
    for row, mask in zip(ids, masks, strict=True):
        ones = [place for place, value in enumerate(mask) if value != 0]
        real = ones[-1] + 1 if ones else len(mask)
        pairs.append((row[:real], mask[:real]))
    return pairs


def _part(encoded: Any, name: str) -> list[list[int]]:
    try:
        part = encoded[name]
    except (KeyError, TypeError, IndexError, AttributeError):
        raise PromptError(
            f"the batch is {quote(encoded)}, without {name}; allowed: what tokenizer(texts, padding=True) returns"
        ) from None
    part = part.tolist() if hasattr(part, "tolist") else part
    if not isinstance(part, Sequence) or not part or not all(isinstance(row, Sequence) and len(row) for row in part):
        raise PromptError(
            f"{name} of the batch are {quote(part)}; allowed: [B, n], at least one row of at least one id"
        )
    return [list(row) for row in part]

"""One trial: a needle, what the model wrote about it, and the attention of the rows that wrote it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvprobe import engine, runs
from kvprobe.errors import TaskError
from kvprobe.heads.overlap import rouge1_recall, token_f1
from kvprobe.inputs import count
from kvprobe.interventions import KVMask
from kvprobe.prompts import alignment
from kvprobe.prompts.alignment import Range
from kvprobe.tasks.items import Item
from kvprobe.traces import Trace

SPANS = ("value", "needle")
NEW_TOKENS = 50
TRIES = 2
"""Passes that try the gold answer: at once, and behind what the model writes before it (a colon, for instance)."""


@dataclass(frozen=True, eq=False)
class Decoded:
    """A greedily decoded item.

    Attributes
    ----------
    item
        What was asked.
    span
        The tokens [start, stop) of the prompt that a head must look at.
    generated
        The T tokens written, up to the end of the text or of its first line; none where the model ends at once.
    text
        What they say, without special tokens.
    trace
        Rows n − 1 … n − 2 + T: row t is the one that wrote token t (at least one row, which then wrote none).
    recall, f1
        ROUGE-1 recall and token F1 of the text for the asked value (:mod:`kvprobe.heads.overlap`).
    """

    item: Item
    span: Range
    generated: tuple[int, ...]
    text: str
    trace: Trace
    recall: float
    f1: float


def decoded(model: Any, item: Item, *, span: str = "value", new_tokens: int = NEW_TOKENS) -> Decoded:
    """Decode an item greedily and look at the rows that wrote the answer; all but the last token are prefilled once.

    Parameters
    ----------
    item
        Asks for one value, which stands in its evidence.
    span
        ``"value"``: the tokens of the asked value inside the evidence (what must be copied); ``"needle"``: the whole
        evidence.
    new_tokens
        The most tokens to decode.

    Raises
    ------
    TaskError
        Another ``span``; an item with no evidence, or with several values; a value that is not in its evidence (naming
        the nearest text there).

    Notes
    -----
    The answer ends with the text, or before the first new line behind something written, as in Wu et al.'s runs: what a
    model rambles on with is no answer, and a value copied again below it would count twice.
    """
    where = needle_tokens(model, item, span)
    n = len(item.prompt)
    new_tokens = count("new_tokens", new_tokens, 1)
    prefix = runs.prefill(model, item.prompt, n - item.prompt.pad - 1)
    written = first_line(model, greedy(model, item, new_tokens, prefix))
    # The last written token is read by no row that writes another.
    whole = item.prompt.extended(written[:-1]) if len(written) > 1 else item.prompt
    trace = runs.observe(model, whole, list(range(n - 1, len(whole))), prefix=prefix)
    text = model.tokenizer.decode(written, skip_special_tokens=True)
    (value,) = item.references
    return Decoded(item, where, written, text, trace, rouge1_recall(text, value), token_f1(text, value))


def greedy(model: Any, item: Item, new_tokens: int, prefix: Any) -> list[int]:
    """What the model writes greedily, without the end of the text: the same tokens as one step after another, sooner.

    A pass over several rows costs little more than one over a single row, so the gold answer is tried first: the rows
    that would have written it are taken over, and the first one that would not says what comes instead. After
    :data:`TRIES` passes of this kind the rest is decoded token by token.
    """
    written: list[int] = []
    gold, ends = list(item.answer_ids), engine.end_of_sequence(model)
    for _ in range(TRIES if gold else 0):
        said = _said(model, _after(item, written), gold, prefix)
        right = next((t for t, token in enumerate(gold) if said[t] != token), len(gold))
        for token in said[: right + 1]:
            if token in ends or len(written) == new_tokens:
                return written
            written.append(token)
        if right == len(gold):
            break
    rest = new_tokens - len(written)
    if not rest:
        return written
    free = runs.intervene(
        model, _after(item, written), KVMask([]), suffix=1, generate=rest, prefix=prefix, keep_trace=False
    )
    return written + list(free.generated)


def _after(item: Item, written: Sequence[int]) -> Any:
    """The prompt with what is written so far."""
    return item.prompt.extended(tuple(written)) if written else item.prompt


def _said(model: Any, prompt: Any, guess: Sequence[int], prefix: Any) -> list[int]:
    """First choices of the rows that would write a guess, and of the one behind it."""
    forced = runs.intervene(
        model, prompt, KVMask([]), suffix=1, continuation=list(guess), prefix=prefix, keep_trace=False
    )
    chosen: list[int] = forced.logits.argmax(-1).tolist()
    return chosen


def first_line(model: Any, generated: Sequence[int]) -> tuple[int, ...]:
    """Generated tokens before the first that holds a new line with something written before it."""
    texts = [model.tokenizer.decode([token]) for token in generated]
    for place, text in enumerate(texts):
        if "\n" in text and "".join(texts[:place]).strip():
            return tuple(generated[:place])
    return tuple(generated)


def needle_tokens(model: Any, item: Item, span: str = "value") -> Range:
    """Tokens [start, stop) of the asked value, or of the whole evidence (see :func:`decoded`).

    A token that holds characters of the value belongs to it whole: the space before a word, for instance.
    """
    if span not in SPANS:
        raise TaskError(f"span is {span!r}, must be one of {', '.join(SPANS)}")
    evidence = item.spans.get("evidence", [])
    if len(evidence) != 1 or len(item.references) != 1:
        raise TaskError(
            f"{item.task} has {len(evidence)} spans of evidence and {len(item.references)} values; heads are scored on "
            "items with one of each, for instance niah_single_2 or niah_multikey_1"
        )
    (start, stop), value = evidence[0], item.references[0]
    ids = item.prompt.ids[start:stop].tolist()
    text = alignment.decode(model.tokenizer, ids)
    found = alignment.occurrences(text, value) if value else []
    if len(found) != 1:
        raise TaskError(_not_once(value, text, len(found)))
    if span == "needle":
        return start, stop
    first, last = alignment.align(model.tokenizer, text, ids, [(found[0], found[0] + len(value))])[0]
    return start + first, start + last


def _not_once(value: str, text: str, times: int) -> str:
    """What is wrong with a needle, and what stands there instead."""
    if times:
        return f"the value {value!r} occurs {times} times in the evidence {text!r}, must be there once"
    words, size = text.split(), max(1, len(value.split()))
    pieces = [" ".join(words[at : at + size]) for at in range(max(1, len(words) - size + 1))]
    nearest = difflib.get_close_matches(value, pieces, n=1, cutoff=0.0)
    return f"the value {value!r} is not in the evidence {text!r}, must be there once; nearest: {nearest[0]!r}"

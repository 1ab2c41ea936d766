"""An item of a task: a prompt, its answer, and labelled token spans that were decoded and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprobe.errors import PromptError, TaskError
from kvprobe.prompts import Prompt, alignment, encoding
from kvprobe.prompts.alignment import Range

LABELS = ("evidence", "hard", "decoy", "distractor")


@dataclass(frozen=True, eq=False)
class Item:
    """One question with its context.

    Attributes
    ----------
    task, seed, length
        As asked for.
    prompt : Prompt
        Context, question and the beginning of the answer; nothing of the answer itself. Its spans are ``"context"`` and
        ``"question"``.
    answer : str
        Text that follows the prompt, for teacher forcing: a space and the references joined as RULER joins queries
        (``a, b, c, and d``), without a full stop.
    answer_ids : tuple of int
        Token ids of the answer: those that tokenising prompt and answer together gives. Where a tokenizer joins
        characters across the border there are none; the answer is then tokenised by itself and
        ``settings["answer_border"]`` is ``"separate"`` instead of ``"exact"``.
    references : tuple of str
        The values to be found, in the order of the answer: query by query, values of one key as they stand in the text.
    context_stop : int
        First token of the question; everything before it is instruction and context.
    spans : dict of str to list of (int, int)
        Half-open token spans: ``"evidence"`` (one a reference, same order), ``"hard"`` (needles never asked about),
        ``"decoy"``, ``"distractor"``; the last three in the order of the text.
    settings : dict
        Everything the item was made with; JSON-ready.
    """

    task: str
    seed: int
    length: int
    prompt: Prompt
    answer: str
    answer_ids: tuple[int, ...]
    references: tuple[str, ...]
    context_stop: int
    spans: dict[str, list[Range]]
    settings: dict[str, Any] = field(default_factory=dict)


def joined(names: Sequence[str]) -> str:
    """RULER's list of names: ``a`` or ``a, b, and c`` (two become ``a, and b``)."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"


def answer_ids(model: Any, prompt: Prompt, answer: str) -> tuple[tuple[int, ...], str]:
    """Ids of the answer after the prompt, and ``"exact"`` or ``"separate"`` (see :class:`Item`)."""
    try:
        return prompt.continuation(model, answer), "exact"
    except PromptError:
        _end_is_open(model.tokenizer, prompt)
        ids = encoding.encode(model.tokenizer, encoding.render(model.tokenizer, answer), bos=False, offsets=False).body
    decoded = alignment.decode(model.tokenizer, ids)
    if decoded.strip() != answer.strip():
        raise TaskError(f"the tokenizer gives {decoded!r} back for the answer {answer!r}")
    return ids, "separate"


def _end_is_open(tokenizer: Any, prompt: Prompt) -> None:
    """Refuse a prompt that the tokenizer closes with a token of its own: nothing can continue it."""
    text = encoding.render(tokenizer, prompt.text or "")
    body = encoding.encode(tokenizer, text, bos=False, offsets=False).body
    if tuple(prompt.ids[-len(body) :].tolist()) != body:
        last = alignment.decode(tokenizer, [int(prompt.ids[-1])])
        raise TaskError(f"the tokenizer ends every text with {last!r}, so no answer can follow: turn that off")


def verify(
    tokenizer: Any, prompt: Prompt, shown: Mapping[str, Sequence[tuple[Range, str]]], hidden: Sequence[str]
) -> None:
    """Decode every span again.

    Parameters
    ----------
    tokenizer, prompt
        Give the text of a span; spaces and case are not compared.
    shown
        Label → (span, text that decoding it must show).
    hidden
        Texts that no distractor may show.

    Raises
    ------
    TaskError
        If a span does not show its text, or a distractor shows a value.
    """
    ids = prompt.ids.tolist()

    def text(span: Range) -> str:
        return "".join(alignment.decode(tokenizer, ids[slice(*span)]).lower().split())

    for label, pairs in shown.items():
        for span, wanted in pairs:
            if "".join(wanted.lower().split()) not in text(span):
                raise TaskError(f"{label} span {span} does not decode to {wanted!r}")
            if label == "distractor" and any(value.lower() in text(span) for value in hidden):
                raise TaskError(f"distractor {span} holds a value of a needle")

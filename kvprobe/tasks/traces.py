"""Reasoning traces in which a quantity is derived once and mentioned again: all spans located, checked and decoded.

The whole trace is teacher-forced. What is masked is the *first* derivation of the quantity, for every token behind it
(``queries="after"``); what is looked at are the tokens of its later mentions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvprobe.errors import TaskError, quote
from kvprobe.prompts import Prompt, alignment
from kvprobe.prompts.alignment import Range

#: A mention as it is given: first and last character (half-open), and which mention it is.
Given = tuple[int, int, int]


@dataclass(frozen=True)
class Mention:
    """One place at which the quantity's value stands.

    Attributes
    ----------
    start, stop : int
        Half-open token span of the value.
    k : int
        1 for the first derivation's own value, 2 and more for later mentions, in the order of the text.
    rederive : bool
        Whether the text works the value out again at this place.
    """

    start: int
    stop: int
    k: int
    rederive: bool = False

    @property
    def span(self) -> Range:
        """Half-open token span."""
        return self.start, self.stop


@dataclass(frozen=True, eq=False)
class TraceItem:
    """A teacher-forced trace with one probed quantity.

    Attributes
    ----------
    task, seed
        As asked for.
    prompt : Prompt
        The whole trace.
    target : tuple of (int, int)
        Token spans of the first derivation: what is masked. Disjoint and sorted.
    mentions : tuple of Mention
        All mentions of the quantity's value, in the order of the text; those with k of at least 2 lie behind the
        target, and there is at least one.
    hard : tuple of (int, int)
        Derivations of other quantities, before the first later mention: the placebo pool. Disjoint and sorted.
    protect : tuple of (int, int)
        Spans that no placebo may touch; the later mentions are among them, and nothing of the target is.
    settings : dict
        Everything the item was made with; JSON-ready.
    """

    task: str
    seed: int
    prompt: Prompt
    target: tuple[Range, ...]
    mentions: tuple[Mention, ...]
    hard: tuple[Range, ...]
    protect: tuple[Range, ...]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Marks:
    """What a trace marks, in characters: half-open pairs, and the mentions with their k."""

    target: Sequence[Range]
    mentions: Sequence[Given]
    rederive: Sequence[Range] = ()
    hard: Sequence[Range] = ()
    protect: Sequence[Range] = ()
    sections: Mapping[str, Range] = field(default_factory=dict)


def located(
    model: Any, text: str, groups: Mapping[str, Sequence[Range]], sections: Mapping[str, Range]
) -> tuple[Prompt, dict[str, list[Range]]]:
    """Tokenise a text and find groups of character ranges in it.

    Parameters
    ----------
    model
        A loaded model (its ``tokenizer`` and ``max_length`` are used).
    text
        The text.
    groups
        Name → character ranges.
    sections
        Name → character range that the prompt keeps as a span of its own.

    Returns
    -------
    Prompt, dict of str to list of (int, int)
        The prompt with the sections as its spans, and the token spans of every group, in the order given.

    Raises
    ------
    PromptError
        For a span that its tokens do not give back, or more tokens than the model reads.
    """
    wanted = {f"{group} {i}": span for group, spans in groups.items() for i, span in enumerate(spans)}
    prompt = Prompt.from_text(model, text, wanted | {f"section {name}": span for name, span in sections.items()})
    found = {group: [prompt[f"{group} {i}"] for i in range(len(spans))] for group, spans in groups.items()}
    kept = {name: prompt[f"section {name}"] for name in sections}
    return Prompt(prompt.ids, kept, 0, prompt.text), found


def build(task: str, seed: int, model: Any, text: str, marks: Marks, settings: Mapping[str, Any]) -> TraceItem:
    """A trace item from a text and its marks.

    A mention within (or equal to) a range of ``marks.rederive`` is one at which the value is worked out again.

    Raises
    ------
    PromptError
        See :func:`located`.
    TaskError
        For spans that overlap; mentions out of order, of which none is later than the target, or without a token
        before them; a rederivation without a later mention; a placebo behind the first later mention.
    """
    pairs = [(start, stop) for start, stop, _ in marks.mentions]
    groups = {"target": marks.target, "mention": pairs, "hard": marks.hard, "protect": marks.protect}
    prompt, found = located(model, text, groups, marks.sections)
    again = _rederived(text, marks)
    mentions = [
        Mention(*span, k, flag) for span, (_, _, k), flag in zip(found["mention"], marks.mentions, again, strict=True)
    ]
    item = TraceItem(
        task,
        seed,
        prompt,
        tuple(sorted(found["target"])),
        tuple(sorted(mentions, key=lambda mention: mention.span)),
        tuple(sorted(found["hard"])),
        tuple(sorted({*found["protect"], *(mention.span for mention in mentions if mention.k > 1)})),
        dict(settings) | {"tokens": len(prompt)},
    )
    _check_mentions(item, model.tokenizer)
    _check_spans(item, model.tokenizer)
    return item


def disjoint(tokenizer: Any, prompt: Prompt, groups: Mapping[str, Sequence[Range]]) -> None:
    """Refuse spans that share a token, in one group or in two.

    Raises
    ------
    TaskError
        Naming both groups, what they decode to and their tokens.
    """
    spans = sorted((span, label) for label, given in groups.items() for span in given)
    for (one, first), (two, second) in pairwise(spans):
        if two[0] < one[1]:
            names = [f"{label} {shown(tokenizer, prompt, span)}" for span, label in ((one, first), (two, second))]
            raise TaskError(f"{names[0]} and {names[1]} overlap, must share no token")


def shown(tokenizer: Any, prompt: Prompt, span: Range) -> str:
    """A span as a message shows it: its text and its tokens."""
    text = alignment.decode(tokenizer, prompt.ids[slice(*span)].tolist())
    return f"{quote(text)} (tokens {span[0]} to {span[1]})"


def _rederived(text: str, marks: Marks) -> list[bool]:
    """For each mention, whether it lies in a rederivation; every rederivation must hold a later one."""
    for start, stop in marks.rederive:
        if not any(k > 1 and start <= first and last <= stop for first, last, k in marks.mentions):
            raise TaskError(f"rederive {quote(text[start:stop])} holds no mention, must hold one with k of at least 2")
    return [
        k > 1 and any(start <= first and last <= stop for start, stop in marks.rederive)
        for first, last, k in marks.mentions
    ]


def _check_mentions(item: TraceItem, tokenizer: Any) -> None:
    """In order, disjoint, predicted by some token, and the later ones behind the target."""
    disjoint(tokenizer, item.prompt, {"mention": [mention.span for mention in item.mentions]})
    counts, end = [mention.k for mention in item.mentions], item.target[-1][1]
    if counts != sorted(counts) or not counts or counts[0] < 1 or counts[-1] < 2:
        raise TaskError(f"mentions have k = {counts}, must be at least 1, not go back, and reach 2 or more")
    for mention in item.mentions:
        name = f"mention {shown(tokenizer, item.prompt, mention.span)} with k = {mention.k}"
        if mention.k > 1 and mention.start < end:
            raise TaskError(f"{name} must begin behind the target, which ends before token {end}")
        if mention.start == 0:
            raise TaskError(f"{name} has no token before it that could predict it, must have one")


def _check_spans(item: TraceItem, tokenizer: Any) -> None:
    """Target, placebos and protected spans keep apart; placebos stand where they can touch every later mention."""
    apart = {"target": item.target, "hard": item.hard}
    disjoint(tokenizer, item.prompt, apart)
    for span in item.protect:  # these may overlap each other
        disjoint(tokenizer, item.prompt, apart | {"protect": (span,)})
    later = min(mention.start for mention in item.mentions if mention.k > 1)
    for span in item.hard:
        if span[1] > later:
            raise TaskError(
                f"hard {shown(tokenizer, item.prompt, span)} must end before the first later mention, at token {later}"
            )

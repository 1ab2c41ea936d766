"""Documents: long texts as prompts, the context first and the question behind it.

What stands before ``context_stop`` (leading instruction and context) is what a policy compresses; the question is fed
after it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvprobe.errors import PromptError, TaskError, quote
from kvprobe.prompts import Prompt, encoding
from kvprobe.tasks import fitting, sources
from kvprobe.tasks.options import whole_number
from kvprobe.tasks.sources import Text

#: Where the context stands in a template.
CONTEXT = "{context}"
TEMPLATES = {
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:"
    ),
    "none": CONTEXT,
}


@dataclass(frozen=True, eq=False)
class Document:
    """A text in its task template.

    Attributes
    ----------
    name : str
        What tables call it; that of several texts is ``"first..last"``.
    prompt : Prompt
        The template with the text in it. Its span ``"context"`` holds the tokens of the text.
    context_stop : int
        First token after the part that is compressed: instruction and context are before it, the question is behind it.
        A token with characters of both belongs to the context. Where nothing follows the context this is
        ``len(prompt)``.
    truncated : bool
        Whether the text was cut to fit.
    texts : int
        How many texts were joined.
    """

    name: str
    prompt: Prompt
    context_stop: int
    truncated: bool = False
    texts: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, Prompt):
            raise TaskError(f"prompt is {quote(self.prompt)}, must be a Prompt")
        stop = whole_number("context_stop", self.context_stop)
        if not self.prompt.pad < stop <= len(self.prompt):
            least = self.prompt.pad + 1
            raise TaskError(f"context_stop is {stop}, must be from {least} to the prompt's {len(self.prompt)} tokens")


def documents(
    model: Any,
    source: str | os.PathLike[str] | Sequence[str] | Sequence[Text] | Sequence[Document] | None = None,
    *,
    n: int | None = None,
    length: int | None = None,
    join: int = 1,
    template: str = "multi_news",
    chat: bool | str = False,
) -> list[Document]:
    """Texts as prompts whose context can be compressed before the question is read.

    Parameters
    ----------
    model
        A loaded model (its ``tokenizer`` and ``max_length`` are used).
    source
        Whatever :func:`kvprobe.tasks.sources.read` takes (None: the shipped essays; a file or folder; a data set of the
        hub); or a list of texts, named ``text-0``, ``text-1``, …; a list of
        :class:`~kvprobe.tasks.sources.Text`; or a list of documents, which are returned as they are.
    n
        How many documents, the first ones; None for all there are.
    length
        Most tokens of a whole prompt. A longer text is cut at its end, behind the last word (at whitespace) that fits;
        LongBench's own scripts cut out the middle instead. None: one less than the model reads, so that a token can be
        decoded.
    join
        How many consecutive texts make a document, with a blank line between them (MultiNews' documents are several
        passages); a last group that is not complete is left out.
    template
        ``"multi_news"`` (LongBench's own [1]_), ``"none"`` (the text alone), or a text that holds ``{context}`` once.
    chat
        Whether (and by which template of the tokenizer) the prompt is a chat message. The end of the message and the
        opening of the assistant's turn are then part of the question.

    Returns
    -------
    list of Document
        In the order of the source.

    Raises
    ------
    TaskError
        For a setting that is not allowed, more documents than there are, a text that the tokenizer does not give back,
        or a length that holds not even one word (naming the smallest that does).
    DataError
        For files, see :func:`kvprobe.tasks.sources.read`.

    References
    ----------
    .. [1] Bai et al., LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding, arXiv 2308.14508.

    Examples
    --------
    >>> document = documents(model, n=1, length=1000)[0]                     # doctest: +SKIP
    >>> document.prompt["context"], document.context_stop, document.truncated    # doctest: +SKIP
    """
    n = None if n is None else whole_number("n", n, 1, " or None")
    join = whole_number("join", join, 1)
    frame = _Frame(model, *_halves(template), _chat(chat))
    limit = _limit(getattr(model, "max_length", None), length)
    given = _given(source)
    if isinstance(given[0], Document):
        if (length, join, template, chat) != (None, 1, "multi_news", False):  # they would be ignored
            raise TaskError(
                "source is made of Documents: length, join, template and chat must be left at their defaults"
            )
        return _first(given, n)
    return [frame.document(group, limit) for group in _first(_groups(given, join), n)]


def _halves(template: Any) -> tuple[str, str]:
    """What stands before and behind the context."""
    text = TEMPLATES.get(template, template) if isinstance(template, str) else None
    if text is None or text.count(CONTEXT) != 1:
        names = ", ".join(map(repr, TEMPLATES))
        raise TaskError(f"template is {quote(template)}, must be {names} or a text that holds {CONTEXT} exactly once")
    before, after = text.split(CONTEXT)
    return before, after


def _chat(chat: Any) -> bool | str:
    if not isinstance(chat, bool | str) or chat == "":
        raise TaskError(f"chat is {quote(chat)}, must be True, False or the name of one of the tokenizer's templates")
    return chat


def _limit(most: int | None, length: Any) -> int | None:
    """Most tokens of a prompt."""
    if length is None:
        return None if most is None else most - 1
    length = whole_number("length", length, 1, " or None")
    if most is not None and length > most:
        raise TaskError(f"length is {length}, the model reads at most {most}")
    return length


def _given(source: Any) -> list[Any]:
    """The source as a list of Text or a list of Document."""
    if not isinstance(source, list | tuple):
        allowed = f"None, {sources.ALLOWED}, or a list of texts or of Documents"
        if source is not None and not isinstance(source, str | os.PathLike):
            raise TaskError(f"source is {quote(source)}, must be {allowed}")
        return list(sources.read(source))
    kinds = {kind for kind in (str, Text, Document) if any(isinstance(one, kind) for one in source)}
    if len(kinds) != 1 or not all(isinstance(one, tuple(kinds)) for one in source):
        raise TaskError(f"source is {quote(source)}, must be a list of only str, only Text or only Document, not empty")
    found = [Text(f"text-{i}", one) for i, one in enumerate(source)] if kinds == {str} else list(source)
    _check_names(found)
    return found


def _check_names(found: list[Any]) -> None:
    """Refuse names that tables would mix up, and texts without a word."""
    seen = set()
    for one in found:
        if not isinstance(one.name, str) or one.name in seen:
            raise TaskError(f"source has the name {quote(one.name)}, must be names (str) of which no two are the same")
        seen.add(one.name)
        if isinstance(one, Text) and (not isinstance(one.text, str) or not one.text.strip()):
            raise TaskError(f"{one.name} is {quote(one.text)}, must be a text that is not empty")


def _groups(texts: list[Text], join: int) -> list[list[Text]]:
    """Disjoint groups of consecutive texts."""
    if join > len(texts):
        raise TaskError(f"join is {join}, must be at most the {len(texts)} texts there are")
    return [texts[i : i + join] for i in range(0, len(texts) - join + 1, join)]


def _first(found: list[Any], n: int | None) -> list[Any]:
    if n is not None and n > len(found):
        raise TaskError(f"n is {n}, must be at most the {len(found)} documents there are, or None for all")
    return found[:n]


@dataclass(frozen=True)
class _Frame:
    """What stands around every context, and how it is tokenised."""

    model: Any
    before: str
    after: str
    chat: bool | str

    def text(self, context: str) -> str:
        """The template filled in; not by ``format``, since texts hold braces."""
        return f"{self.before}{context}{self.after}"

    def count(self, context: str) -> int:
        """Tokens of the prompt."""
        tokenizer = self.model.tokenizer
        rendered = encoding.render(tokenizer, self.text(context), chat=self.chat)
        return len(encoding.encode(tokenizer, rendered, offsets=False).ids)

    def document(self, group: list[Text], limit: int | None) -> Document:
        """One document of a group of texts."""
        single = len(group) == 1
        name = group[0].name if single else f"{group[0].name}..{group[-1].name}"
        whole = group[0].text if single else "\n\n".join(text.text.strip() for text in group)
        try:
            context = whole if limit is None else self._cut(name, whole, limit)
            prompt = self.prompt(context)
        except PromptError as error:
            raise TaskError(f"document {name!r}: {error}") from error
        stop = prompt["context"][1] if self.after or self.chat else len(prompt)
        return Document(name, prompt, stop, context != whole, len(group))

    def prompt(self, context: str) -> Prompt:
        """The prompt with the span of its context."""
        text = self.text(context)
        start, stop = len(self.before), len(self.before) + len(context)
        if self.chat:  # chat templates may strip the message
            start, stop = max(start, len(text) - len(text.lstrip())), min(stop, len(text.rstrip()))
        return Prompt.from_text(self.model, text, {"context": (start, stop)}, chat=self.chat)

    def _cut(self, name: str, text: str, limit: int) -> str:
        """The first words of a text, as many as fit; the whole with all of its whitespace, if that fits."""
        stops = [word.end() for word in re.finditer(r"\S+", text)]
        stops += [len(text)] if stops[-1] < len(text) else []

        @cache
        def count(words: int) -> int:
            return self.count(text[: stops[words - 1]]) if words <= len(stops) else limit + 1

        if len(stops) <= limit and count(len(stops)) <= limit:
            return text
        if count(1) > limit:
            raise TaskError(f"{name}: at most {limit} tokens hold no word of it, the smallest length is {count(1)}")
        return text[: stops[fitting.largest(count, limit, 1) - 1]]

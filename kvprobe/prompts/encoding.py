"""Text to token ids: one policy for the beginning-of-sequence token (BOS) and for chat templates.

``bos``
    ``"tokenizer"``: what the tokenizer does by itself (``add_special_tokens=True``; in a chat, what its template
    renders); ``True``: exactly one BOS; ``False``: none added, none taken away. Never two: a text that already begins
    with BOS gets no other, and one that begins with two is refused (unless ``bos=False``, which leaves text alone).
``chat``
    The text becomes one user message of the tokenizer's chat template (or of its named template). Where the message
    lies in the rendered text is found with a placeholder, so spans of the message stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvprobe.errors import PromptError
from kvprobe.prompts.alignment import Range

_PLACEHOLDER = "kvprobe-message"


@dataclass(frozen=True)
class Rendered:
    """A text ready to be tokenised.

    Attributes
    ----------
    text : str
        The whole text, chat template included.
    first : int
        Character of ``text`` at which character 0 of the user's text stands (would stand, if it was stripped).
    message : (int, int)
        The characters of ``text`` that are the user's own.
    chat : bool
        Whether a chat template rendered it (special tokens are then the template's business).
    """

    text: str
    first: int
    message: Range
    chat: bool

    def locate(self, wanted: Range, label: str) -> Range:
        """Characters of the rendered text for characters of the user's text."""
        start, stop = wanted[0] + self.first, wanted[1] + self.first
        if self.message[0] <= start and stop <= self.message[1]:
            return start, stop
        raise PromptError(f"span {label!r} covers characters {wanted} that the chat template strips from the message")


@dataclass(frozen=True)
class Encoded:
    """Token ids of a text: ``ids = before + body + after``, where ``body`` encodes the text alone.

    ``offsets`` are the characters of each token of ``body`` as the tokenizer reports them (None: it does not).
    """

    before: tuple[int, ...]
    body: tuple[int, ...]
    after: tuple[int, ...]
    offsets: Sequence[Range] | None

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids."""
        return self.before + self.body + self.after


def render(
    tokenizer: Any,
    text: str,
    *,
    chat: bool | str = False,
    system: str | None = None,
    add_generation_prompt: bool = True,
    prefill: str = "",
) -> Rendered:
    """The text as the model will see it: as it is, or as one user message of a chat.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.
    text
        The user's text.
    chat
        False, True (the tokenizer's template) or the name of one of its templates.
    system
        A system message before it (chat only).
    add_generation_prompt
        Whether the template opens the assistant's turn.
    prefill
        Text behind all that: the beginning of the answer.

    Raises
    ------
    PromptError
        If the tokenizer has no such template, or the template does not show the message as it was given.
    """
    if not chat:
        if system is not None:
            raise PromptError(f"system={system!r} needs a chat template: pass chat=True")
        return Rendered(text + prefill, 0, (0, len(text)), False)
    template = _template(tokenizer, chat)
    before, after = _frame(tokenizer, template, system, add_generation_prompt)
    rendered = _apply(tokenizer, template, text, system, add_generation_prompt)
    inner = rendered[len(before) : len(rendered) - len(after)]
    if not (rendered.startswith(before) and rendered.endswith(after) and inner in (text, text.strip())):
        raise PromptError(f"the chat template changes the message, so no span is exact: it shows {inner[:60]!r}")
    stripped = len(text) - len(text.lstrip()) if inner != text else 0
    message = (len(before), len(before) + len(inner))
    return Rendered(rendered + prefill, len(before) - stripped, message, True)


def _template(tokenizer: Any, chat: bool | str) -> str | None:
    """The named template's text, or None for the tokenizer's only or default one."""
    known = getattr(tokenizer, "chat_template", None)
    if not known:
        raise PromptError("the tokenizer has no chat template: pass chat=False, or set tokenizer.chat_template first")
    named = known if isinstance(known, dict) else {"default": known}
    wanted = "default" if chat is True else chat
    if wanted not in named:
        raise PromptError(
            f"chat={chat!r} is not one of the tokenizer's templates: {', '.join(map(repr, sorted(named)))}"
        )
    return named[wanted]


def _apply(tokenizer: Any, template: str | None, text: str, system: str | None, opened: bool) -> str:
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=opened
        )
    except Exception as error:  # templates raise what they like, for instance when they know no system role
        raise PromptError(f"the chat template refuses the message: {error}") from error


def _frame(tokenizer: Any, template: str | None, system: str | None, opened: bool) -> tuple[str, str]:
    """What the template puts before and after the user's message."""
    parts = _apply(tokenizer, template, _PLACEHOLDER, system, opened).split(_PLACEHOLDER)
    if len(parts) != 2:
        raise PromptError(f"the chat template shows the user's message {len(parts) - 1} times, must be once")
    return parts[0], parts[1]


def encode(tokenizer: Any, rendered: Rendered, *, bos: bool | str = "tokenizer", offsets: bool = True) -> Encoded:
    """Token ids under the BOS policy (see the module's own text).

    Parameters
    ----------
    tokenizer, rendered
        What encodes what.
    bos
        ``"tokenizer"``, True or False.
    offsets
        False saves asking for them, where only the ids matter.

    Raises
    ------
    PromptError
        For a text without tokens, an unknown policy, a tokenizer without BOS where one is asked for, or two BOS.
    """
    if bos not in (True, False, "tokenizer"):
        raise PromptError(f"bos is {bos!r}, must be 'tokenizer', True or False")
    body, known = _body(tokenizer, rendered.text, offsets)
    start = getattr(tokenizer, "bos_token_id", None)
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    if bos == "tokenizer" and not rendered.chat:
        before, after = _specials(tokenizer)
    elif bos is True:
        if start is None:
            raise PromptError("bos=True, but the tokenizer has no BOS token: pass bos='tokenizer' or bos=False")
        before = (start,)
    if start is not None and body[0] == start:
        before = tuple(token for token in before if token != start)
        if bos is not False and body[:2] == (start, start):
            raise PromptError(f"the text begins with BOS ({tokenizer.bos_token!r}) twice, must be at most once")
    return Encoded(before, body, after, known)


def _body(tokenizer: Any, text: str, offsets: bool) -> tuple[tuple[int, ...], Sequence[Range] | None]:
    """Ids of the text alone, and the characters of each where the tokenizer reports them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the text holds a lone surrogate at character {error.start}: not valid Unicode") from None
    asked = {"return_offsets_mapping": True} if offsets and getattr(tokenizer, "is_fast", False) else {}
    found = tokenizer(text, add_special_tokens=False, verbose=False, **asked)
    if not found["input_ids"]:
        raise PromptError(f"the text {text[:40]!r} has no tokens, must have at least one")
    return tuple(found["input_ids"]), found["offset_mapping"] if asked else None


def _specials(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens that the tokenizer puts before and after every text by itself, seen on a short one."""
    body, ids = (tuple(tokenizer("a", add_special_tokens=added, verbose=False)["input_ids"]) for added in (False, True))
    for lead in range(len(ids) - len(body) + 1):
        if ids[lead : lead + len(body)] == body:
            return ids[:lead], ids[lead + len(body) :]
    raise PromptError("the tokenizer encodes a text differently with special tokens: pass bos=True or bos=False")

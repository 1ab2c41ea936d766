"""Which tokens cover a range of characters.

The tokens of a character range are **all tokens whose characters overlap it**: a token that begins before the range
(`` One`` with its leading space) or that holds a few bytes of one of its characters (emoji, CJK) belongs to the span
whole. Tokens without characters belong to a span only when they lie between two tokens that do.

Two ways lead there. A fast tokenizer reports the characters of every token; we believe it only after checking. Every
other tokenizer is asked to decode growing prefixes of the ids, and the two borders are found by bisection. Either
result is decoded again before it is returned: a span that does not give back its text is an error.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from kvprobe.errors import PromptError

Range = tuple[int, int]
#: What decoders print for bytes that are not a whole character.
PARTIAL = "\N{REPLACEMENT CHARACTER}"
#: Categories that normalisers strip: controls, joiners, and marks (vowel signs among them) that stand on a letter.
DROPPED = ("Cc", "Cf", "Me", "Mn")


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of ``ids`` with special tokens kept and spaces left as they are."""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def align(
    tokenizer: Any, text: str, ids: Sequence[int], ranges: Sequence[Range], offsets: Sequence[Range] | None = None
) -> list[Range]:
    """Half-open token spans of half-open character ranges.

    Parameters
    ----------
    tokenizer
        Anything with ``decode``.
    text
        The text that ``ids`` encode, without special tokens around it.
    ids
        Its token ids.
    ranges
        Character ranges ``(start, stop)`` of ``text``.
    offsets
        The characters of every token as a fast tokenizer reports them, or None.

    Returns
    -------
    list of (start, stop)
        Token positions in ``ids``, one span a range.

    Raises
    ------
    PromptError
        If a span cannot be found and verified by decoding.
    """
    if not ranges:
        return []  # a text that cannot be given back is no fault while nothing is looked for in it
    if offsets is not None and _in_order(offsets, len(text)):
        spans = [_overlapping(offsets, wanted) for wanted in ranges]
        if all(_believed(tokenizer, text, ids, *pair, offsets) for pair in zip(ranges, spans, strict=True)):
            return spans
    prefixes = Prefixes(tokenizer, text, ids)
    return [prefixes.span(wanted) for wanted in ranges]


def _in_order(offsets: Sequence[Range], length: int) -> bool:
    """Whether offsets lie in the text and neither their starts nor their stops ever go back."""
    starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
    inside = all(0 <= start <= stop <= length for start, stop in offsets)
    return inside and starts == sorted(starts) and stops == sorted(stops)


def _overlapping(offsets: Sequence[Range], wanted: Range) -> Range:
    """First to last token that shares a character with ``wanted``."""
    first = bisect_right(offsets, wanted[0], key=lambda pair: pair[1])
    return first, bisect_left(offsets, wanted[1], key=lambda pair: pair[0])


def _believed(
    tokenizer: Any, text: str, ids: Sequence[int], wanted: Range, span: Range, offsets: Sequence[Range]
) -> bool:
    """Whether a span found by offsets claims all of its characters and decodes to no others than it claims."""
    claims = offsets[slice(*span)]
    if not any(stop > start for start, stop in claims) or not _claimed(text, wanted, claims):
        return False
    stop = claims[-1][1]
    while stop < len(text) and _merges(text[stop]):
        stop += 1
    return _verified(tokenizer, text, ids, wanted, span, (claims[0][0], stop))


def _claimed(text: str, wanted: Range, claims: Sequence[Range]) -> bool:
    """Whether tokens claim every character of a range; what a normaliser drops or merges may be missing."""
    at, missing = wanted[0], ""
    for start, stop in claims:
        missing += text[at:start]
        at = max(at, stop)
    missing += text[at : wanted[1]]
    return all(char.isspace() or _merges(char) or unicodedata.category(char) in DROPPED for char in missing)


def _merges(char: str) -> bool:
    """Whether normalisers may merge a character into the one before: accents, later parts of a Hangul syllable."""
    return unicodedata.combining(char) != 0 or "\u1160" <= char <= "\u11ff"


def _squeezed(text: str) -> str:
    # Sentencepiece decoders drop the space before their first token, so whitespace cannot decide.
    return "".join(text.split())


def _forms(tokenizer: Any, text: str) -> set[str]:
    """``text`` as written and as the tokenizer's own normaliser (NFC, lower case, …) rewrites it, without spaces."""
    normaliser = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    return {_squeezed(text)} | ({_squeezed(normaliser.normalize_str(text))} if normaliser is not None else set())


def _verified(tokenizer: Any, text: str, ids: Sequence[int], wanted: Range, span: Range, cover: Range) -> bool:
    """Whether a span decodes to at least the characters wanted and to no more than those its tokens cover."""
    start, stop = span
    if start >= stop:
        return False
    quoted = text[slice(*wanted)]
    if quoted.isspace():  # nothing is left once spaces are squeezed: look for it as it is, behind its neighbour too
        return any(quoted in decode(tokenizer, ids[first:stop]) for first in (start, max(start - 1, 0)))
    seen = _squeezed(decode(tokenizer, ids[start:stop]).removeprefix("##"))  # WordPiece's mark inside a word
    covered = _forms(tokenizer, text[slice(*cover)])
    # All that its tokens cover is enough: part of a character (a letter without its accent) normalises to another.
    enough = seen in covered or any(form in seen for form in _forms(tokenizer, quoted))
    return enough and any(seen.strip(PARTIAL) in form for form in covered)


class Prefixes:
    """Token borders from decoded prefixes; needs no offsets, only that decoding gives the text back.

    ``decode(ids[:i])`` grows with ``i``, up to replacement characters at its end while a character is incomplete.
    With ``complete(i)`` the whole characters and ``touched(i)`` those begun by the first ``i`` tokens, the span of
    characters [a, b) is [max {i : touched(i) ≤ a}, min {i : complete(i) ≥ b}).

    Raises
    ------
    PromptError
        If the ids do not decode to the text (leading spaces aside).
    """

    def __init__(self, tokenizer: Any, text: str, ids: Sequence[int]) -> None:
        self.tokenizer, self.text, self.ids = tokenizer, text, list(ids)
        self.whole = decode(tokenizer, ids)
        if self.whole.lstrip() != text.lstrip() or PARTIAL in text:
            raise PromptError(
                f"spans cannot be located: the tokenizer reports no usable offsets, and {_difference(text, self.whole)}"
                "; give token spans to Prompt.from_ids instead"
            )
        self.dropped = len(text) - len(self.whole)  # leading spaces that decoding loses (or adds, if negative)
        self._known: dict[int, Range] = {}

    def characters(self, count: int) -> Range:
        """(complete, touched) characters of the decoded text after ``count`` tokens."""
        if count not in self._known:
            decoded = decode(self.tokenizer, self.ids[:count])
            clean = decoded.rstrip(PARTIAL)
            if not self.whole.startswith(clean):
                raise PromptError(
                    f"spans cannot be located: the first {count} tokens decode to {clean[-20:]!r} at the end"
                )
            self._known[count] = (len(clean), len(clean) + (clean != decoded))
        return self._known[count]

    def span(self, wanted: Range) -> Range:
        """Token span of the characters ``wanted`` of the text, verified."""
        shown = (max(wanted[0] - self.dropped, 0), max(wanted[1] - self.dropped, 0))
        counts = range(len(self.ids) + 1)
        stop = bisect_left(counts, shown[1], key=lambda count: self.characters(count)[0])
        last = bisect_right(counts, shown[0], key=lambda count: self.characters(count)[1]) - 1
        # Tokens just before ``last`` that show nothing are either empty or, where a decoder hides incomplete
        # characters, the first bytes of the span: they are taken in if the text cannot be had without them.
        first = min(bisect_left(counts, shown[0], key=lambda count: self.characters(count)[0]), last)
        for start in (last, first) if shown[1] > 0 else ():
            cover = (self.characters(start)[0], self.characters(min(stop, len(self.ids)))[1])
            if _verified(self.tokenizer, self.whole, self.ids, shown, (start, stop), cover):
                return start, stop
        raise PromptError(f"no tokens give back {self.text[slice(*wanted)]!r} (characters {wanted[0]} to {wanted[1]})")


def _difference(text: str, decoded: str) -> str:
    if PARTIAL in text:
        return "the text holds U+FFFD, which looks like a character split over tokens"
    at = next((i for i, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b), min(len(text), len(decoded)))
    return f"its tokens decode to {decoded[at : at + 20]!r} where the text has {text[at : at + 20]!r}"


def occurrences(text: str, part: str) -> list[int]:
    """Start of every occurrence of ``part`` in ``text``, overlapping ones included."""
    found, start = [], text.find(part)
    while start >= 0:
        found.append(start)
        start = text.find(part, start + 1)
    return found


def resolve(text: str, wanted: Any, label: str) -> Range:
    """Character range of a span given as a substring or as ``(start, stop)`` characters."""
    if isinstance(wanted, str):
        found = occurrences(text, wanted) if wanted else []
        if len(found) != 1:
            raise PromptError(
                f"span {label!r}: {wanted!r} occurs {len(found)} times in the text, must be exactly once; "
                "give (char_start, char_stop) instead"
            )
        return found[0], found[0] + len(wanted)
    return bounds(wanted, len(text), label, "characters")


def bounds(wanted: Any, stop: int, label: str, unit: str, start: int = 0) -> Range:
    """``wanted`` as a checked half-open pair of integers inside [start, stop)."""
    try:
        first, last = wanted
        if isinstance(first, bool) or isinstance(last, bool):
            raise TypeError
        pair = (first.__index__(), last.__index__())
    except (TypeError, ValueError, AttributeError):
        raise PromptError(f"span {label!r} is {wanted!r}, must be a pair (start, stop) of whole numbers") from None
    if not start <= pair[0] < pair[1] <= stop:
        raise PromptError(f"span {label!r} is {pair}, must have {start} <= start < stop <= {stop} ({unit})")
    return pair

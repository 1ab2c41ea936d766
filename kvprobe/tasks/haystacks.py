"""What needles are hidden in: essays, lines of noise, or lines of other needles.

A haystack hands out its first ``n`` units as pieces, in order. The unit is what the length of an item is adjusted by:
a whitespace word of an essay (the last sentence may be cut, as in RULER), a line of noise, a line that is a needle.
"""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

from kvprobe import resources
from kvprobe.errors import TaskError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*\s+")


@dataclass(frozen=True)
class Piece:
    """A stretch of context that needles are put between.

    Attributes
    ----------
    text : str
        What it says.
    label : str
        ``"content"``, or what it is of a needle item: ``"evidence"``, ``"hard"``, ``"decoy"``.
    value : str
        What decoding its span must show.
    """

    text: str
    label: str = "content"
    value: str = ""


class Haystack(Protocol):
    """What an item is filled up with."""

    @property
    def separator(self) -> str:
        """What joins pieces."""

    @property
    def lines(self) -> bool:
        """Whether needles go before lines drawn without replacement (else: at percentages of depth)."""

    def pieces(self, n: int) -> list[Piece]:
        """The first ``n`` units."""

    def facts(self, n: int) -> dict[str, object]:
        """What an item stores about its ``n`` units."""


@dataclass(frozen=True)
class Noise:
    """Lines that all say the same (RULER's noise)."""

    separator: str = "\n"
    lines: bool = True

    def pieces(self, n: int) -> list[Piece]:
        """The first ``n`` lines."""
        return [Piece(NOISE)] * n

    def facts(self, n: int) -> dict[str, object]:
        """Number of lines."""
        return {"units": n, "unit": "line"}


class Needles:
    """Lines that are needles themselves, drawn one after the other."""

    separator, lines = "\n", True

    def __init__(self, draw: Callable[[], Piece]) -> None:
        self._draw, self._drawn = draw, list[Piece]()

    def pieces(self, n: int) -> list[Piece]:
        """The first ``n`` lines; the same lines every time."""
        self._drawn += [self._draw() for _ in range(n - len(self._drawn))]
        return self._drawn[:n]

    def facts(self, n: int) -> dict[str, object]:
        """Number of lines."""
        return {"units": n, "unit": "line"}


class Essays:
    """Running text, cut into sentences; begins again from the start only when it is used up.

    Parameters
    ----------
    documents
        Sentences of each document. Several are put in random order; a single one begins at a random sentence.
    rng
        Decides that order.
    """

    separator, lines = " ", False

    def __init__(self, documents: Sequence[Sequence[str]], rng: random.Random) -> None:
        order = list(documents)
        rng.shuffle(order)
        turn = rng.randrange(len(order[0])) if len(order) == 1 else 0
        sentences = [sentence for document in order for sentence in document]
        self.sentences = sentences[turn:] + sentences[:turn]
        self._ends = list(accumulate(len(sentence.split()) for sentence in self.sentences))

    def pieces(self, n: int) -> list[Piece]:
        """Sentences of the first ``n`` words, the last one cut where they end."""
        rounds, rest = divmod(n, self._ends[-1])
        whole = bisect_right(self._ends, rest)
        left = rest - (self._ends[whole - 1] if whole else 0)
        cut = [" ".join(self.sentences[whole].split()[:left])] if left else []
        return [Piece(sentence) for sentence in self.sentences * rounds + self.sentences[:whole] + cut]

    def facts(self, n: int) -> dict[str, object]:
        """Number of words, and whether the text had to begin again."""
        return {"units": n, "unit": "word", "haystack_words": self._ends[-1], "repeated": n > self._ends[-1]}


def sentences(text: str) -> list[str]:
    """Sentences of a text, whitespace made single spaces; a sentence ends at ``.``, ``!`` or ``?`` and any closers."""
    flat = " ".join(text.split())
    cuts = [0, *(match.end() for match in _SENTENCE_END.finditer(flat)), len(flat)]
    return [flat[a:b].strip() for a, b in pairwise(cuts) if flat[a:b].strip()]


def documents(path: str | Path | None = None) -> tuple[tuple[str, ...], ...]:
    """Sentences of the shipped essays, or of a user's own texts.

    Parameters
    ----------
    path
        None for the shipped essays (their title lines are left out); a folder of ``.txt`` files; one ``.txt`` file; or
        a ``.json`` file of the form ``{"text": "…"}`` (``PaulGrahamEssays.json``).

    Raises
    ------
    TaskError
        If the path holds no text of these forms.
    """
    shipped = path is None
    place = resources.path("essays") if path is None else Path(path).expanduser()
    files = sorted(place.glob("*.txt")) if place.is_dir() else [place]
    found = [_sentences_of(str(file), shipped, file.stat().st_mtime_ns) for file in files if file.is_file()]
    found = [document for document in found if document]
    if not found:
        raise TaskError(
            f"no text in {str(place)!r}: must be a folder of .txt files, a .txt file or a .json {{'text': …}}"
        )
    return tuple(found)


@lru_cache(maxsize=512)
def _sentences_of(file: str, titled: bool, _changed: int) -> tuple[str, ...]:
    """Sentences of one file; read again when the file has changed."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        text = json.loads(text)["text"] if file.endswith(".json") else text
        return tuple(sentences(text.split("\n", 1)[-1] if titled else text))
    except (UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(f"cannot read {file!r}: must be UTF-8 text or a .json {{'text': …}} ({error!r})") from None

"""Where needles go in a haystack, and the context that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvprobe.errors import TaskError
from kvprobe.prompts.alignment import Range
from kvprobe.tasks.haystacks import Haystack, Piece, sentences
from kvprobe.tasks.needles import Streams

#: RULER's depths in per cent, ``round(linspace(0, 100, 40))``.
DEPTHS = tuple(round(100 * step / 39) for step in range(40))


@dataclass(frozen=True)
class Context:
    """The text between instruction and question.

    Attributes
    ----------
    text : str
    planted : list of (int, int)
        Characters of each planted piece, in the order of planting (not of the text).
    others : list of (Piece, (int, int))
        Pieces of the haystack that are needles themselves.
    runs : list of lists of (int, int)
        Characters of the haystack's own sentences; each run is free of anything planted.
    depths : list of float
        Depth in per cent of each planted piece.
    """

    text: str
    planted: list[Range]
    others: list[tuple[Piece, Range]]
    runs: list[list[Range]]
    depths: list[float]


@dataclass(frozen=True)
class Planting:
    """Needles and decoys, and the depths at which they go into a haystack.

    In running text a piece goes before sentence ``int(n_sentences · depth / 100)``, depths drawn without replacement
    from :data:`DEPTHS`; among lines it goes before one drawn without replacement, as in RULER. ``depths`` fixes those
    of the first pieces, in per cent.
    """

    haystack: Haystack
    pieces: Sequence[Piece]
    streams: Streams
    depths: Sequence[float] = field(default=())

    def __post_init__(self) -> None:
        if not self.haystack.lines and len(self.pieces) > len(DEPTHS):
            raise TaskError(f"{len(self.pieces)} needles and decoys, must be at most {len(DEPTHS)} (one a depth)")

    @property
    def minimum(self) -> int:
        """The least number of haystack units that holds everything planted."""
        return max(1, len(self.pieces)) if self.haystack.lines else 1

    def places(self, n: int) -> tuple[list[int], list[float]]:
        """For each planted piece, the haystack piece it goes before (of ``n``), and its depth in per cent."""
        given = list(self.depths)
        if self.haystack.lines:
            fixed = [int(n * depth / 100) for depth in given]
            drawn = fixed + self._draw(range(n), fixed)
            return drawn, given + [100 * place / n for place in drawn[len(given) :]]
        depths = given + [float(depth) for depth in self._draw(DEPTHS, given)]
        return [int(n * depth / 100) for depth in depths], depths

    def _draw(self, choices: Sequence[int], given: Sequence[float]) -> list[int]:
        """One choice for each piece without a given one; needles draw first, so that decoys do not move them."""
        labels, drawn, taken = [piece.label for piece in self.pieces[len(given) :]], list[int](), set(given)
        for purpose, count in (("needles", len(labels) - labels.count("decoy")), ("decoys", labels.count("decoy"))):
            free = [choice for choice in choices if choice not in taken]
            drawn += self.streams(f"places of {purpose}").sample(free, count)
            taken.update(drawn)
        return drawn

    def order(self, n: int) -> tuple[list[tuple[Piece, int | None]], list[float]]:
        """All pieces with the haystack's first ``n`` units (a number marks a planted one), and the planted depths."""
        hay = self.haystack.pieces(n)
        places, depths = self.places(len(hay))
        order: list[tuple[Piece, int | None]] = []
        waiting, done = sorted(range(len(places)), key=lambda i: (places[i], i)), 0
        for number in waiting:
            order += [(piece, None) for piece in hay[done : places[number]]]
            order.append((self.pieces[number], number))
            done = places[number]
        return order + [(piece, None) for piece in hay[done:]], depths

    def text(self, n: int) -> str:
        """The text of :meth:`compose`, without its spans."""
        return self.haystack.separator.join(piece.text for piece, _ in self.order(n)[0])

    def compose(self, n: int) -> Context:
        """The context with the haystack's first ``n`` units."""
        return self._laid_out(*self.order(n))

    def _laid_out(self, order: Sequence[tuple[Piece, int | None]], depths: list[float]) -> Context:
        """Character ranges of ordered pieces."""
        planted, others, runs, at = [(0, 0)] * len(self.pieces), [], [list[Range]()], 0
        for piece, number in order:
            chars = (at, at + len(piece.text))
            if number is not None:
                planted[number] = chars
            elif piece.label != "content":
                others.append((piece, chars))
            if number is not None or piece.label != "content":
                runs.append([])
            else:
                runs[-1] += _sentence_ranges(piece.text, at)
            at = chars[1] + len(self.haystack.separator)
        text = self.haystack.separator.join(piece.text for piece, _ in order)
        return Context(text, planted, others, [run for run in runs if run], depths)


def _sentence_ranges(text: str, at: int) -> list[Range]:
    found, start = [], 0
    for sentence in sentences(text):
        start = text.index(sentence, start)
        found.append((at + start, at + start + len(sentence)))
        start += len(sentence)
    return found

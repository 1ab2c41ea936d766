"""The text of an arithmetic trace: numbers and things are drawn, sentences written, and what matters is marked.

No number stands for two things. The problem states two factors of every quantity, the solution derives each product
once, and then the sentences come back to one of them (the probed one) in turn with the others.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from kvprobe.prompts.alignment import Range
from kvprobe.tasks.needles import Streams

#: Names of groups and of what is in them.
THINGS = (
    ("boxes", "pencils"),
    ("shelves", "books"),
    ("trays", "muffins"),
    ("rows", "chairs"),
    ("bags", "apples"),
    ("packs", "stickers"),
    ("crates", "bottles"),
    ("jars", "candies"),
    ("vases", "flowers"),
    ("folders", "photos"),
    ("baskets", "lemons"),
    ("tubes", "markers"),
)
PEOPLE = ("Maria", "Daniel", "Aisha", "Tom", "Priya", "Lucas", "Hannah", "Omar")
EVENTS = ("school fair", "summer party", "street market", "charity sale", "spring festival", "club meeting")

PROBLEM = "Problem: For the {event}, {person} has {facts}. How many of each thing are there?"
FACT = "{operands} {things} each"
SOLUTION = "\n\nSolution: We multiply to find each number.\n"
#: The value stands behind the name of its quantity, always in the same words: a small model then predicts it well.
DERIVED = "We get the number of {things} from {expression}.\n"
AGAIN = "We get the number of {things} again from {expression}.\n"
THEN = "Next, we look at what could change.\n"
#: Sentences that come back to a value, and the sign of the change (0: none).
USES = (
    ("The number of {things} is {value}, and with {n} more it is {result}.\n", 1),
    ("The number of {things} is {value}, and without {n} of them it is {result}.\n", -1),
    ("The number of {things} is {value}, as before.\n", 0),
)

#: Digits of a value → digits of its two factors.
FACTORS = {3: (2, 2), 4: (2, 2), 5: (2, 3), 6: (3, 3)}
_TRIES = 400


@dataclass(frozen=True)
class Quantity:
    """``a`` groups of ``b`` things."""

    groups: str
    things: str
    a: int
    b: int

    @property
    def value(self) -> int:
        """How many things."""
        return self.a * self.b

    @property
    def operands(self) -> str:
        """The factors as the problem states them."""
        return f"{self.a} {self.groups} with {self.b}"

    @property
    def expression(self) -> str:
        """The derivation."""
        return f"{self.a} * {self.b} = {self.value}"


@dataclass
class Page:
    """A text that grows, and the characters of what is marked in it.

    Attributes
    ----------
    text : str
        So far.
    marked : dict of str to list of (int, int)
        Label → half-open character ranges.
    """

    text: str = ""
    marked: dict[str, list[Range]] = field(default_factory=dict)

    def write(self, part: str, label: str | None = None) -> None:
        """Append a part, and mark it."""
        if label is not None:
            self.marked.setdefault(label, []).append((len(self.text), len(self.text) + len(part)))
        self.text += part

    def fill(self, template: str, words: Mapping[str, Any], slot: str, label: str | None) -> None:
        """Append a template with its words filled in, and mark one of them."""
        before, after = template.split(f"{{{slot}}}")
        self.write(before.format(**words))
        self.write(str(words[slot]), label)
        self.write(after.format(**words))


class Writer:
    """Writes one trace.

    Parameters
    ----------
    streams
        Random streams of the item.
    quantities, mentions, rederive, digits
        How many other quantities; how often the probed value stands in the text, and at how many of the later places it
        is worked out again; digits of every value.
    """

    def __init__(self, streams: Streams, quantities: int, mentions: int, rederive: int, digits: int) -> None:
        self.streams, self.page, self.mentions = streams, Page(), mentions
        pairs = products(streams(f"products {digits}"), quantities + 1, digits)
        things = streams("things").sample(THINGS, quantities + 1)
        self.quantities = [Quantity(*names, *pair) for names, pair in zip(things, pairs, strict=True)]
        # Neither the first nor the last, so that placebos stand on both sides.
        self.probed = streams("probed").randrange(1, quantities)
        self.again = set(streams("rederive").sample(range(2, mentions + 1), rederive))
        self.used = {number for each in self.quantities for number in (each.a, each.b, each.value)}

    @property
    def target(self) -> Quantity:
        """The probed quantity."""
        return self.quantities[self.probed]

    def written(self) -> Page:
        """The whole trace; labels ``operands``, ``target``, ``hard``, ``mention``, ``again``."""
        self._problem()
        self.page.write(SOLUTION)
        for each in self.quantities:
            probed = each is self.target
            self.page.fill(DERIVED, self._words(each), "expression", "target" if probed else "hard")
            if probed:
                self._ending("target")
        self.page.write(THEN)
        self._uses()
        return self.page

    def _problem(self) -> None:
        rng = self.streams("frame")
        words = {"person": rng.choice(PEOPLE), "event": rng.choice(EVENTS)}
        before, after = PROBLEM.split("{facts}")
        self.page.write(before.format(**words))
        for place, each in enumerate(self.quantities):
            self.page.write(("", ", ", ", and ")[(place > 0) + (place == len(self.quantities) - 1)])
            self.page.fill(FACT, self._words(each), "operands", "operands" if each is self.target else None)
        self.page.write(after.format(**words))

    def _uses(self) -> None:
        """Every later mention, and before each a sentence about another quantity."""
        rng = self.streams("uses")
        others = [each for each in self.quantities if each is not self.target]
        rng.shuffle(others)
        kinds = cycle(rng.sample(USES, len(USES)))
        for k, other in zip(range(2, self.mentions + 1), cycle(others), strict=False):
            self._use(other, *next(kinds), rng, None)
            if k in self.again:
                self.page.fill(AGAIN, self._words(self.target), "expression", "again")
                self._ending("again")
            else:
                self._use(self.target, *next(kinds), rng, "mention")

    def _use(self, quantity: Quantity, template: str, sign: int, rng: random.Random, label: str | None) -> None:
        """One sentence that comes back to a quantity."""
        words = self._words(quantity)
        if sign:
            words |= self._change(quantity.value, sign, rng)
        self.page.fill(template, words, "value", label)

    def _change(self, value: int, sign: int, rng: random.Random) -> dict[str, int]:
        """A two-digit change and its result, of which neither number is in the text yet."""
        while True:
            n = rng.randrange(11, 100)
            if not {n, value + sign * n} & self.used:
                self.used |= {n, value + sign * n}
                return {"n": n, "result": value + sign * n}

    def _ending(self, label: str) -> None:
        """Mark the value at the end of the latest derivation as a mention."""
        stop = self.page.marked[label][-1][1]
        self.page.marked.setdefault("mention", []).append((stop - len(str(self.target.value)), stop))

    @staticmethod
    def _words(each: Quantity) -> dict[str, Any]:
        return {
            "things": each.things,
            "operands": each.operands,
            "expression": each.expression,
            "value": each.value,
        }


def products(rng: random.Random, count: int, digits: int) -> list[tuple[int, int]]:
    """Pairs of factors whose products have so many digits; all factors and products differ, none ends with 0."""
    while len(found := _drawn(rng, count, digits)) < count:
        pass  # small factors ran out: begin anew
    return found


def _drawn(rng: random.Random, count: int, digits: int) -> list[tuple[int, int]]:
    used, found = set[int](), list[tuple[int, int]]()
    bounds = [(11 * 10 ** (size - 2), 10**size) for size in FACTORS[digits]]
    for _ in range(_TRIES):
        a, b = (rng.randrange(*pair) for pair in bounds)
        numbers = {a, b, a * b}
        if a % 10 and b % 10 and len(numbers) == 3 and len(str(a * b)) == digits and not numbers & used:
            used |= numbers
            found.append((a, b))
        if len(found) == count:
            break
    return found

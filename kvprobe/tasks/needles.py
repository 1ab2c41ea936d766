"""Keys, values and needle sentences, drawn from seeded streams."""

from __future__ import annotations

import hashlib
import random
import uuid
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources as packaged

from kvprobe import resources
from kvprobe.errors import DataError, TaskError
from kvprobe.tasks.haystacks import Piece

NEEDLE = "One of the special magic {kind} for {key} is: {value}."


@dataclass(frozen=True)
class Streams:
    """Independent random streams of an item, one for each purpose.

    A stream depends on task, seed and purpose alone, so that items which differ in one option (decoys, length, …)
    share everything else: the needles, their depths and the order of the essays.
    """

    task: str
    seed: int

    def __call__(self, purpose: str) -> random.Random:
        """The stream for one purpose, from its beginning."""
        digest = hashlib.sha256(f"{self.task}|{self.seed}|{purpose}".encode()).digest()
        return random.Random(int.from_bytes(digest[:16], "big"))


@dataclass
class Names:
    """Draws keys and values; none comes twice within an item."""

    used: set[str] = field(default_factory=set)

    def draw(self, kind: str, rng: random.Random) -> str:
        """One ``"words"`` (adjective-noun), ``"numbers"`` (seven digits) or ``"uuids"`` (version 4) string."""
        while True:
            name = _DRAWS[kind](rng)
            if name.lower() not in self.used:
                self.used.add(name.lower())
                return name


def _word_pair(rng: random.Random) -> str:
    # Uniform over all pairs, as a draw from RULER's list of six million of them.
    return f"{rng.choice(_words('adjectivelist.txt'))}-{rng.choice(_words('nounlist.txt'))}"


_DRAWS = {
    "words": _word_pair,
    "numbers": lambda rng: str(rng.randint(10**6, 10**7 - 1)),
    "uuids": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


@lru_cache(maxsize=2)
def _words(name: str) -> tuple[str, ...]:
    """A word list of the wonderwords package."""
    try:
        text = packaged.files("wonderwords.assets").joinpath(name).read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise DataError(
            f"keys need the word lists of the package wonderwords (pip install wonderwords): {error}"
        ) from None
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def needle(kind: str, key: str, value: str, label: str) -> Piece:
    """The sentence that hides ``value`` under ``key``; ``kind`` is the plural word for the values."""
    return Piece(NEEDLE.format(kind=kind, key=key, value=value), label, value)


def decoys(count: int, rng: random.Random) -> list[Piece]:
    """``count`` different plain sentences of about a needle's length, from ``data/tasks/decoys.txt``."""
    lines = resources.path("tasks", "decoys.txt").read_text(encoding="utf-8").splitlines()
    known = [line for line in lines if line and not line.startswith("#")]
    if count > len(known):
        raise TaskError(f"decoys is {count}, must be at most {len(known)}")
    return [Piece(line, "decoy", line) for line in rng.sample(known, count)]

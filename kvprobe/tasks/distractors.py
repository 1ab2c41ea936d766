"""Distractors: stretches of the haystack's own content to hold against the evidence.

They have the evidence's length in tokens, are disjoint from each other and from everything planted, and lie around the
evidence, as many before it as after it where the text allows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from kvprobe.prompts.alignment import Range

TOLERANCE = 0.10


def sentence_tiles(runs: Sequence[Sequence[Range]], tokens: int) -> list[Range]:
    """Disjoint stretches that begin with a sentence, laid through the runs from left to right.

    Whole sentences (one or more) within ±10 % of ``tokens`` where there are some, else ``tokens`` tokens from the
    beginning of a sentence.

    Parameters
    ----------
    runs
        Token spans of consecutive sentences, one list for every stretch that nothing planted interrupts.
    tokens
        The length of the evidence.
    """
    tiles, slack = [], math.floor(tokens * TOLERANCE + 1e-9)
    for run in runs:
        free = run[0][0]
        for i, (start, _) in enumerate(run):
            if start < free or run[-1][1] - start < tokens - slack:
                continue
            whole = [stop for _, stop in run[i:] if abs(stop - start - tokens) <= slack]
            free = min(whole, key=lambda stop: abs(stop - start - tokens), default=start + tokens)
            if free <= run[-1][1]:
                tiles.append((start, free))
    return tiles


def window_tiles(runs: Sequence[Sequence[Range]], tokens: int, rng: random.Random) -> list[Range]:
    """As many disjoint windows of ``tokens`` tokens as fit, at random places."""
    tiles = []
    for run in runs:
        start, stop = run[0][0], run[-1][1]
        fit = max(stop - start, 0) // tokens
        slack = stop - start - fit * tokens
        shifts = sorted(rng.randint(0, slack) for _ in range(fit))
        tiles += [(start + i * tokens + shift, start + (i + 1) * tokens + shift) for i, shift in enumerate(shifts)]
    return tiles


def choose(tiles: Sequence[Range], evidence: Sequence[Range], count: int, rng: random.Random) -> list[Range]:
    """``count`` of the tiles, near the evidence and in turn before and after it.

    Each is drawn from the nearest free tiles on its side (twice as many as that side needs); a side that runs out is
    filled from the other one.

    Returns
    -------
    list of (start, stop)
        In the order of the text.
    """
    free, chosen, flip = list(tiles), list[Range](), rng.randrange(2)
    pool = 2 * math.ceil(count / (2 * len(evidence)))
    for turn in range(min(count, len(tiles))):
        start = evidence[turn % len(evidence)][0]
        sides = [[t for t in free if t[0] < start], [t for t in free if t[0] >= start]]
        side = (turn // len(evidence) + flip) % 2
        near = sorted(sides[side] or sides[1 - side], key=lambda tile: abs(tile[0] - start))[:pool]
        chosen.append(rng.choice(near))
        free.remove(chosen[-1])
    return sorted(chosen)


def balance(evidence: Sequence[Range], distractors: Sequence[Range], context: Range) -> dict[str, float | None]:
    """How alike the positions are.

    ``position_auroc`` is the share of (evidence, distractor) pairs in which the evidence comes later: 0.5 says that
    position alone does not tell them apart. Depths are mean starts in per cent of the context's tokens.
    """
    pairs = [(e[0], d[0]) for e in evidence for d in distractors]
    length = context[1] - context[0]

    def depth(spans: Sequence[Range]) -> float | None:
        return round(100 * sum(s[0] - context[0] for s in spans) / (len(spans) * length), 2) if spans else None

    return {
        "position_auroc": sum(e > d for e, d in pairs) / len(pairs) if pairs else None,
        "evidence_depth": depth(evidence),
        "distractor_depth": depth(distractors),
    }

"""Buckets: which tokens are counted together. Every real position is in exactly one of them, a left pad in none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprobe.errors import PromptError, quote
from kvprobe.sinks.checks import whole
from kvprobe.spans.inputs import check_spans

BUCKETS = ("first4", "evidence", "secondary_sink", "other", "recent", "learned_sink")
"""Names in the order of tables. ``learned_sink`` is no key: its mass comes from the model's own sink logits."""

FIRST = 4
"""Leading positions of ``first4``, as StreamingLLM keeps them (Xiao et al., arXiv 2309.17453); BOS is one of them."""


@dataclass(frozen=True)
class Buckets:
    """Disjoint sets of keys that together are the real positions of a prompt.

    Attributes
    ----------
    keys
        Bucket → positions, ascending; every key bucket is named, if empty. Real positions are pad … n − 1.
    n, pad
        Key columns, and how many of the first are left pads.
    """

    keys: Mapping[str, tuple[int, ...]]
    n: int
    pad: int = 0

    def names(self) -> NDArray[np.str_]:
        """Bucket of each position ``[n]``; ``"pad"`` for left pads."""
        found = np.full(self.n, "pad", dtype=f"U{max(map(len, BUCKETS))}")
        for name, keys in self.keys.items():
            found[list(keys)] = name
        return found


def buckets(
    n: int,
    *,
    evidence: Sequence[tuple[int, int]] = (),
    secondary: Iterable[int] = (),
    context_stop: int | None = None,
    pad: int = 0,
    first: int = FIRST,
) -> Buckets:
    """Sort positions into buckets; where several claim one, the earlier of this list has it.

    ``first4`` (positions pad … pad + first − 1, so BOS is counted once), ``evidence``, ``secondary_sink``, ``recent``
    (from ``context_stop`` on: question and answer), ``other``.

    Parameters
    ----------
    n
        Key columns, left pads included.
    evidence
        Half-open token spans.
    secondary
        Positions labelled as secondary sinks (:mod:`kvprobe.sinks.secondary`).
    context_stop
        First position behind the context; None: nothing is ``recent``.
    pad
        Left pads; they are in no bucket, whatever claims them.
    first
        How many leading positions make up ``first4``.

    Raises
    ------
    PromptError
        A span or position outside the prompt, or n, pad, first or context_stop that are no such numbers.
    """
    _check(n, pad, first, context_stop)
    wanted = {
        "first4": range(pad, min(pad + first, n)),
        "evidence": [key for start, stop in check_spans(evidence, n) for key in range(start, stop)] if evidence else [],
        "secondary_sink": _positions(secondary, n),
        "recent": range(n if context_stop is None else context_stop, n),
        "other": range(pad, n),
    }
    taken: set[int] = set(range(pad))
    keys: dict[str, tuple[int, ...]] = {}
    for name, claimed in wanted.items():
        keys[name] = tuple(sorted(set(claimed) - taken))
        taken.update(keys[name])
    return Buckets({name: keys[name] for name in BUCKETS if name in keys}, n, pad)


def _check(n: int, pad: int, first: int, context_stop: int | None) -> None:
    for name, value, least in (("n", n, 1), ("pad", pad, 0), ("first", first, 0)):
        whole(value, name, least, PromptError)
    if context_stop is not None:
        whole(context_stop, "context_stop", 0, PromptError)
    if pad >= n:
        raise PromptError(f"pad={quote(pad)} with n = {quote(n)} keys; allowed: 0 <= pad < n")
    if context_stop is not None and not pad <= context_stop <= n:
        raise PromptError(f"context_stop={quote(context_stop)}; allowed: {pad} … {n}, or None")


def _positions(keys: Iterable[int], n: int) -> list[int]:
    found = list(keys)
    if wrong := [key for key in found if not isinstance(key, (int, np.integer)) or not 0 <= key < n]:
        raise PromptError(f"secondary sink at position {quote(wrong[0])}; allowed: 0 … {n - 1}")
    return found

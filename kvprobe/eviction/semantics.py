"""When a cache is evicted, and who sees the loss: three semantics that are never mixed up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from kvprobe import engine, inputs
from kvprobe.errors import EvictionError
from kvprobe.eviction.live import LiveCache, PackedCache
from kvprobe.eviction.measuring import check as check_context
from kvprobe.eviction.measuring import context_ids
from kvprobe.eviction.policies import Policy, entries
from kvprobe.receipts import Receipt


@dataclass(frozen=True)
class Chunked:
    """Evict after every ``chunk`` tokens of the context: later chunks are computed from what is left."""

    chunk: int

    def __post_init__(self) -> None:
        _whole("chunk", self.chunk)

    def __str__(self) -> str:
        return f"chunked({self.chunk})"


@dataclass(frozen=True)
class Decode:
    """Evict to ``target`` entries a head on average after every ``interval`` generated tokens.

    Nothing is evicted while the cache holds no more than that, or while a head (uniform budgets) or a layer (budgets
    shared within one) still holds less.
    """

    interval: int
    target: int

    def __post_init__(self) -> None:
        _whole("interval", self.interval)
        _whole("target", self.target)

    def __str__(self) -> str:
        return f"decode({self.interval}, {self.target})"


@dataclass(frozen=True)
class Generated:
    """What a model wrote from an evicted cache.

    Attributes
    ----------
    ids
        Greedy tokens, up to and without an end-of-sequence token.
    logits
        [steps, vocab]: the rows that each token was chosen from.
    keep
        [L, K, n] at the end, over all tokens run.
    semantics
        The names of what was done.
    receipts
        One verified receipt a pass under masks; none for a packed cache, which has nothing to mask.
    cache_bytes
        Keys and values in memory at the end.
    """

    ids: list[int]
    logits: Tensor = field(repr=False)
    keep: Bool[Tensor, "L K n"] = field(repr=False)
    semantics: str
    receipts: list[Receipt] = field(repr=False)
    cache_bytes: int


def chunked_prefill(
    model: Any, context: Any, policy: Policy, cache_ratio: Any, chunk: int, *, physical: bool = False
) -> LiveCache:
    """Prefill a context in chunks, evicting to ⌊seen · cache_ratio⌋ entries a head after each.

    Parameters
    ----------
    model, context, policy
        A loaded model, token ids or a Prompt, and the policy.
    cache_ratio
        Share of the tokens seen so far that stays after each chunk.
    chunk
        Tokens a chunk; a chunk as long as the context is prefill-then-evict.
    physical
        Drop evicted entries from memory (:class:`PackedCache`) instead of masking them.

    Returns
    -------
    LiveCache
        With ``layers``, ``keep`` and receipts.
    """
    _whole("chunk", chunk)
    ids = context_ids(model, context)
    inputs.check_length(model, len(ids))
    return _read(model, ids, policy, cache_ratio, Chunked(chunk), physical)[0]


def generate(
    model: Any,
    prompt: Any,
    policy: Policy,
    cache_ratio: Any,
    *,
    context: int,
    tokens: int,
    chunked: Chunked | None = None,
    decode: Decode | None = None,
    physical: bool = False,
) -> Generated:
    """Compress the first ``context`` tokens of a prompt, run the rest and write ``tokens`` tokens greedily.

    Parameters
    ----------
    model, policy, cache_ratio
        As in :meth:`Policy.select`.
    prompt
        A Prompt.
    context
        Number of prompt tokens that are compressed; what follows sees what is left of them. Equal to the prompt's
        length: question and context are compressed together.
    tokens
        Tokens to write.
    chunked
        Evict while the context is read; by default it is read whole first (prefill-then-evict).
    decode
        Evict again while writing; by default written tokens stay.
    physical
        Drop evicted entries from memory instead of masking them (equal budgets within a layer only).

    Returns
    -------
    Generated

    Raises
    ------
    EvictionError
        The policy cannot do this (ragged budgets with ``physical``, scores that need aligned heads, …).
    """
    for name, value, kind in (("chunked", chunked, Chunked), ("decode", decode, Decode)):
        if value is not None and not isinstance(value, kind):
            raise EvictionError(f"{name}={value!r}; allowed: {kind.__name__}(…) or None")
    ids = inputs.real_ids(model, prompt)
    stop = inputs.count("context", context, 1, len(ids))
    tokens = inputs.count("tokens", tokens, 1)
    inputs.check_length(model, len(ids) + tokens)
    whole = stop == len(ids)
    cache, logits = _read(model, ids[:stop], policy, cache_ratio, chunked, physical)
    if not whole:
        logits = cache.feed(ids[stop:], rows=1)
    written, rows = _write(model, cache, logits[-1], tokens, decode)
    names = [str(chunked or "prefill-then-evict"), *([str(decode)] if decode else [])]
    return Generated(written, torch.stack(rows), cache.keep, " + ".join(names), cache.receipts, cache.n_bytes)


def _read(
    model: Any, ids: Tensor, policy: Policy, cache_ratio: Any, chunked: Chunked | None, physical: bool
) -> tuple[LiveCache, Tensor]:
    check_context(model, [policy], len(ids), 0)
    cache = (PackedCache if physical else LiveCache)(model, policy)
    step = len(ids) if chunked is None else chunked.chunk
    logits = torch.zeros(0)
    for start in range(0, len(ids), step):
        logits = cache.feed(ids[start : start + step], rows=1)
        cache.evict(entries(cache.length, cache_ratio))
    return cache, logits


def _write(
    model: Any, cache: LiveCache, last: Tensor, tokens: int, decode: Decode | None
) -> tuple[list[int], list[Tensor]]:
    eos, written, rows = engine.end_of_sequence(model), [], []
    for step in range(tokens):
        rows.append(last)
        token = int(last.argmax())
        if token in eos:
            break
        written.append(token)
        if step + 1 == tokens:
            break
        last = cache.feed(torch.tensor([token], device=model.device), rows=1)[-1]
        if decode is not None and len(written) % decode.interval == 0 and _over(cache, decode.target):
            cache.evict(decode.target)
    return written, rows


def _over(cache: LiveCache, target: int) -> bool:
    """Whether the cache holds more than ``target`` entries a head on average, and can be brought down to it."""
    return float(cache.keep.sum(-1).float().mean()) > target and cache.holds(target)


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EvictionError(f"{name}={value!r}; allowed: a whole number ≥ 1")

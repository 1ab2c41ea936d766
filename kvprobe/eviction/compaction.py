"""A compacted cache: the kept entries alone, so that speed and memory can be shown and not only argued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe import engine, inputs
from kvprobe.attention import Run
from kvprobe.engine import Prefix
from kvprobe.errors import EvictionError, quote
from kvprobe.eviction.live import gather


@dataclass(frozen=True)
class Compacted:
    """Kept keys and values, [K, b, d] a layer (b may differ between layers), of a context of ``length`` tokens.

    Keys keep the rotation of their own positions; what follows continues at ``length``.
    """

    layers: list[tuple[Tensor, Tensor]]
    length: int

    @property
    def n_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(part.numel() * part.element_size() for pair in self.layers for part in pair)


def compact(model: Any, prefix: Prefix, keep: Bool[Tensor, "L K n"]) -> Compacted:
    """Drop what is not kept from a prefilled context.

    Parameters
    ----------
    model
        The model whose cache it is.
    prefix
        A prefilled context of n tokens.
    keep
        As :meth:`Policy.select` returns it; every head of a layer must keep the same number.

    Raises
    ------
    EvictionError
        Ragged budgets, query-head granularity, sliding windows, or shapes that do not fit.
    """
    if not isinstance(prefix, Prefix) or not isinstance(keep, Tensor):
        raise EvictionError(
            f"prefix={quote(prefix)}, keep={quote(keep)}; allowed: what prefill(…) returns and a boolean tensor"
        )
    shape = (model.geometry.n_layers, model.geometry.n_kv_heads, len(prefix))
    if tuple(keep.shape) != shape or keep.dtype != torch.bool:
        raise EvictionError(f"keep is {keep.dtype} {list(keep.shape)}; allowed: torch.bool {list(shape)} (kv heads)")
    if any(window is not None for window in model.geometry.windows):
        raise EvictionError(f"{model.name} has sliding-window layers, which count positions; allowed there: KeepMask")
    layers = [
        (gather(keys, kept.to(keys.device)), gather(values, kept.to(keys.device)))
        for (keys, values), kept in zip(prefix.layers, keep, strict=True)
    ]
    return Compacted(layers, len(prefix))


def continue_from(
    model: Any, cache: Compacted, ids: Sequence[int] | Tensor, *, generate: int = 0
) -> tuple[Float[Tensor, "t vocab"], list[int]]:
    """Run ids [t] behind a compacted cache; their logits, and what is then written greedily."""
    if not isinstance(cache, Compacted):
        raise EvictionError(f"{quote(cache)} is no compacted cache; allowed: what compact(…) returns")
    generate = inputs.count("generate", generate, 0)
    rows = inputs.continuation(model, ids)
    if not len(rows):
        raise EvictionError("no token follows the compacted context; allowed: one or more ids")
    inputs.check_length(model, cache.length + len(rows) + generate)
    own = engine.new_cache()
    logits = engine.forward(model.twin, rows[None], Run(cache.layers, cache.length), own)[0]
    return logits, _greedy(model, cache, own, logits[-1], cache.length + len(rows), generate)


def _greedy(model: Any, cache: Compacted, own: Any, last: Tensor, at: int, tokens: int) -> list[int]:
    eos, written = engine.end_of_sequence(model), []
    for step in range(tokens):
        token = int(last.argmax())
        if token in eos:
            break
        written.append(token)
        if step + 1 < tokens:
            run = Run(cache.layers, at + step)
            last = engine.forward(model.twin, torch.tensor([[token]]), run, own)[0, -1]
    return written

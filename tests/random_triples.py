"""Random (logits, values, mask) triples of every awkward kind, for ``stress.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe import theory

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 300)
WIDTHS = ((1, 1), (1, 5), (2, 3), (3, 7), (8, 8), (8, 24), (16, 16), (17, 33))  # d, D
LOGITS = ("plain", "uniform", "one_hot", "huge", "deep")
MASKS = ("random", "prefix", "survivor", "single", "window")
VALUES = ("plain", "alike", "mixed")
HEADS = ((1, 1), (4, 4), (4, 2), (6, 1))  # query heads, kv heads: one, MHA, GQA, MQA


@dataclass(frozen=True)
class Case:
    """One batch of triples of one shape and kind."""

    dtype: torch.dtype
    logits: str
    mask: str
    values: str
    sink: bool
    p: int
    heads: tuple[int, int]
    n: int
    width: tuple[int, int]


@dataclass(frozen=True)
class Triples:
    """Stored numbers: logits ``[B, H, n]``, keep like it, values ``[B, K, n, d]``, projection ``[H, d, D]``."""

    logits: Tensor
    keep: Tensor
    V: Tensor
    W_O: Tensor
    sink: Tensor | None


def batches(n: int, seed: int, largest: int) -> Iterator[tuple[Case, Triples]]:
    """Cases until there are ``n`` triples; long rows come in smaller batches."""
    generator = torch.Generator().manual_seed(seed)
    while n > 0:
        case = make_case(generator)
        heads = case.heads[0]
        rows = min(n, 256, max(heads, largest // (case.n * max(case.width))))
        given = make(case, -(-rows // heads), generator)
        yield case, given
        n -= given.keep.shape[0] * heads


def make_case(generator: torch.Generator) -> Case:
    def draw(choices: tuple) -> object:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    kinds = (draw(DTYPES), draw(LOGITS), draw(MASKS), draw(VALUES), draw((False, False, True)), draw((1, 2)))
    return Case(*kinds, draw(HEADS), draw(SIZES), draw(WIDTHS))


def make(case: Case, batch: int, generator: torch.Generator) -> Triples:
    """Random triples of one kind, rounded to what the dtype stores."""
    (H, K), (d, D), n = case.heads, case.width, case.n
    logits = _logits(case, torch.randn(batch, H, n, generator=generator), generator).to(case.dtype)
    V = torch.randn(batch, K, n, d, generator=generator)
    if case.values == "alike":  # outputs that nearly cancel
        V = torch.randn(batch, K, 1, d, generator=generator) + 1e-3 * V
    if case.values == "mixed":  # one key's values dwarf the others'
        V = V * 10.0 ** torch.randint(-3, 3, (batch, K, n, 1), generator=generator)
    W_O = (torch.randn(H, d, D, generator=generator) / d**0.5).to(case.dtype)
    sink = 3 * torch.randn(batch, H, generator=generator) if case.sink else None
    rows = logits.to(row_dtype(case.dtype))
    keep = _keep(case, rows, generator)
    visible = torch.arange(n) >= n - max(1, n // 3) if case.mask == "window" else torch.ones(n, dtype=torch.bool)
    rows = torch.where(visible, rows, -torch.inf)
    return Triples(rows, _keeping_a_key(rows, keep, sink), V.to(case.dtype), W_O, sink)


def _logits(case: Case, x: Tensor, generator: torch.Generator) -> Tensor:
    largest = 6e4 if case.dtype == torch.float16 else 2e5
    if case.logits == "uniform":
        return torch.zeros_like(x) + x[..., :1]
    if case.logits == "one_hot":
        return x + 30 * (torch.arange(case.n) == torch.randint(case.n, x.shape[:-1], generator=generator)[..., None])
    if case.logits == "huge":  # some rows share one huge offset, others hold both signs
        sign = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        return torch.where(x[..., :1] > 0, sign[..., :1] * largest + x, sign * largest + x)
    if case.logits == "deep":  # down to where weights are subnormal, or nothing
        return -110 * torch.rand(x.shape, generator=generator)
    return 4 * x


def _keep(case: Case, rows: Tensor, generator: torch.Generator) -> Tensor:
    at, picked = torch.arange(case.n), torch.randint(case.n, rows.shape[:-1], generator=generator)[..., None]
    if case.mask == "prefix":
        return at.expand_as(rows) >= picked
    if case.mask == "survivor":
        return at == picked
    if case.mask == "single":
        return at != picked
    share = torch.rand(rows.shape[:-1], generator=generator)[..., None]
    return torch.rand(rows.shape, generator=generator) < share


def _keeping_a_key(rows: Tensor, keep: Tensor, sink: Tensor | None) -> Tensor:
    """Rows that would retain nothing keep their last visible key of any weight: all masked is refused, not bounded."""
    A, mass = theory.attention(rows, None if sink is None else sink.to(rows.dtype))
    empty = theory.retained(A, keep, mass) <= 0
    seen = (A > 0) * torch.arange(1, rows.shape[-1] + 1)
    last = torch.nn.functional.one_hot(seen.argmax(-1), rows.shape[-1]).bool()
    return keep | (last & empty.unsqueeze(-1))


def row_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32

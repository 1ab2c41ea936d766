"""Sums inside and outside many key sets at once: what the laws need of every head and row, without cancellation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvprobe.errors import TheoryError
from kvprobe.placebo.keysets import KeySet, Span, text
from kvprobe.placebo.scope import Layer

MAGNIFIED = 0.05
"""Below this retained share float32 sums are not good enough: dividing by R magnifies their rounding."""
NEARLY_ALL = 1e-6
"""Below this retained share z′ comes from its own sum: (z − u_S) / R has lost six digits of float64's sixteen."""


@dataclass(frozen=True)
class Cut:
    """The keys of a layer cut at every edge of every set: a set, and its complement, is a sum of whole pieces.

    Attributes
    ----------
    sets
        P key sets.
    lengths
        Keys in each piece, in order.
    inside
        [pieces, P] float64, 1 where a set holds a piece.
    members
        [spans, P] float64, 1 where a set holds a span.
    spans
        By length: numbers [s] of the spans of that length, and their keys [s, length].
    """

    sets: Sequence[KeySet]
    lengths: list[int]
    inside: Tensor
    members: Tensor
    spans: list[tuple[Tensor, Tensor]]

    @staticmethod
    def of(sets: Sequence[KeySet], extent: tuple[int, int, torch.device]) -> Cut:
        """Cut the keys of a layer, clipped to those that some query sees (a span may become empty)."""
        first, k, device = extent
        clipped = [[_clip(span, first, k) for span in keys] for keys in sets]
        cuts = list(pairwise(sorted({0, k, *(edge for keys in clipped for span in keys for edge in span)})))
        starts = {lo: number for number, (lo, _) in enumerate(cuts)} | {k: len(cuts)}
        inside = torch.zeros(len(cuts), len(sets), dtype=torch.float64)
        for number, keys in enumerate(clipped):
            for lo, hi in keys:
                inside[starts[lo] : starts[hi], number] = 1
        distinct = sorted({span for keys in clipped for span in keys if span[0] < span[1]})
        members = _members(clipped, distinct).to(device)
        return Cut(sets, [hi - lo for lo, hi in cuts], inside.to(device), members, _by_length(distinct, device))

    def sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of ``x`` [..., k] inside and outside each set, [..., P]."""
        by_piece = torch.stack([part.sum(-1) for part in x.split(self.lengths, -1)], -1)
        return by_piece @ self.inside, by_piece @ (1 - self.inside)

    def columns(self, pieces: Tensor) -> Tensor:
        """Numbers of pieces as numbers of keys."""
        return pieces.repeat_interleave(torch.tensor(self.lengths, device=pieces.device))

    def value_sums(self, layer: Layer) -> Tensor:
        """u_S = Σ_S A V, [K, P, Q, G, d]: rows × heads of one kv head side by side, as products want them."""
        V, _, Q, G, d = layer.values, *layer.output.shape
        of_span = V.new_zeros(len(V), len(self.members), Q * G, d)
        for numbers, keys in self.spans:
            A = layer.by_key[keys].permute(2, 0, 3, 1)  # [K, s, Q·G, length]
            for g in range(len(V)):
                of_span[g, numbers] = A[g] @ V[g][keys]
        of_set = of_span if self.simple else self.members.to(V.dtype).T @ of_span.flatten(2)
        return of_set.view(len(V), -1, Q, G, d)

    def part(self, block: slice) -> Cut:
        """The cut of some of the sets, with their spans only."""
        members = self.members[:, block]
        used = members.any(1)
        renumbered = used.cumsum(0) - 1
        spans = []
        for numbers, keys in self.spans:
            mine = used[numbers]
            if bool(mine.any()):
                spans.append((renumbered[numbers[mine]], keys[mine]))
        return Cut(self.sets[block], self.lengths, self.inside[:, block], members[used], spans)

    @property
    def simple(self) -> bool:
        """Is every set the span of its number?"""
        return len(self.members) == len(self.sets) and bool(self.members.diagonal().sum() == self.members.sum())


@dataclass(frozen=True)
class Sums:
    """Evicted and retained mass, the same of A m, [H, Q, P]; z′ and z′ − z, [P, Q, H, d]; float64, 0 where unseen."""

    mass: Tensor
    retained: Tensor
    value_mass: Tensor | None
    kept_value_mass: Tensor | None

    @staticmethod
    def of(layer: Layer, cut: Cut, strict: bool = True) -> Sums:
        """Masses of every set. One that leaves a row without any attention is an error, or NaN where not ``strict``."""
        mass, retained = cut.sums(layer.heads.A)
        if layer.heads.sink_mass is not None:
            retained = retained + layer.heads.sink_mass.unsqueeze(-1)
        empty = (retained <= 0) & (mass > 0)
        if strict and bool(empty.any()):
            raise TheoryError(_all_attention(layer, cut, *empty.nonzero()[0].tolist()))
        retained, mass = retained.where(~empty, torch.nan), mass.where(~empty, torch.nan)
        w = (None, None) if layer.m is None else cut.sums(layer.heads.A * layer.m)
        return Sums(mass, retained, *w)

    @property
    def inflation(self) -> Tensor:
        """a_S / R, 0 where the set has no mass."""
        return torch.where(self.mass == 0, 0.0, self.mass / self.retained)

    @property
    def bound(self) -> Tensor:
        """θ = w_S + (a_S / R) w_N by head, [H, Q, P]."""
        assert self.kept_value_mass is not None
        return self.evicted_value_mass + self.inflation * self.kept_value_mass

    @property
    def evicted_value_mass(self) -> Tensor:
        """w_S by head, [H, Q, P]."""
        assert self.value_mass is not None
        return self.value_mass

    def shift(self, layer: Layer, cut: Cut, exact: bool = False) -> Tensor:
        """z′ − z = a_S z′ − u_S, as (a_S z − u_S) / R, [K, P, Q, G, d].

        In float64 where the division would magnify float32's rounding, or where ``exact``; else in the model's dtype.
        """
        chosen = layer if exact or bool((self.retained < MAGNIFIED).any()) else layer.single
        R, mass = (_by_set(layer, x) for x in (torch.where(self.mass == 0, 1.0, self.retained), self.mass))
        shift = cut.value_sums(chosen)
        shift.mul_((-1 / R).to(shift.dtype)).addcmul_((mass / R).to(shift.dtype), chosen.output.unsqueeze(1))
        for number, centre in self._nearly_all(layer, cut):
            # Here even float64's division magnifies too much: the stable form, from sums of their own.
            u_S = layer.outputs(layer.heads.A * cut.columns(cut.inside[:, number]))
            shift[:, number] = mass[:, number] * centre - u_S
        return shift

    def part(self, block: slice) -> Sums:
        """The masses of some sets."""
        return Sums(self.mass[..., block], self.retained[..., block], None, None)

    def centre(self, layer: Layer, cut: Cut) -> Tensor:
        """z′ = u_N / R, [K, P, Q, G, d]; 0 in a row that sees nothing."""
        centre = (layer.output.unsqueeze(1) - cut.value_sums(layer)).div_(self._divisor(layer))
        for number, exact in self._nearly_all(layer, cut):
            centre[:, number] = exact
        return centre

    def _nearly_all(self, layer: Layer, cut: Cut) -> Iterator[tuple[int, Tensor]]:
        """Sets that leave some row next to nothing, and their z′ [K, Q, G, d] as a sum over what is kept."""
        for number in ((self.retained < NEARLY_ALL) & (self.mass > 0)).any(0).any(0).nonzero()[:, 0].tolist():
            kept = layer.heads.A * cut.columns(1 - cut.inside[:, number])
            yield number, layer.outputs(kept) / self._divisor(layer)[:, number]

    def _divisor(self, layer: Layer) -> Tensor:
        """R, and 1 in a row that sees nothing."""
        R = torch.where(self.mass == 0, layer.heads.total.unsqueeze(-1), self.retained)
        return _by_set(layer, torch.where(R == 0, 1.0, R))


def _by_set(layer: Layer, x: Tensor) -> Tensor:
    """[H, Q, P] as [K, P, Q, G, 1]."""
    return layer.grouped(x).permute(0, 3, 1, 2).unsqueeze(-1)


def _all_attention(layer: Layer, cut: Cut, h: int, q: int, number: int) -> str:
    return (
        f"the set {text(cut.sets[number])} holds all attention of layer {layer.index}, head {layer.numbers[h]}, row "
        f"{int(layer.queries[q])}, which then has none left (R = 0); allowed: sets that leave every row a key"
    )


def _clip(span: Span, first: int, k: int) -> Span:
    start, stop = (min(max(edge - first, 0), k) for edge in span)
    return start, stop


def _members(clipped: list[list[Span]], distinct: list[Span]) -> Tensor:
    numbers = {span: number for number, span in enumerate(distinct)}
    members = torch.zeros(max(1, len(distinct)), len(clipped), dtype=torch.float64)
    for number, keys in enumerate(clipped):
        members[[numbers[span] for span in keys if span in numbers], number] = 1
    return members


def _by_length(distinct: list[Span], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    lengths = torch.tensor([stop - start for start, stop in distinct], dtype=torch.long)
    starts = torch.tensor([start for start, _ in distinct], dtype=torch.long)
    found = []
    for length in lengths.unique().tolist():
        numbers = (lengths == length).nonzero()[:, 0]
        keys = starts[numbers, None] + torch.arange(length)
        found.append((numbers.to(device), keys.to(device)))
    return found

"""Sums inside and outside spans of any lengths and overlaps, by additions only, in float64."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvprobe.spans.inputs import Heads, Span


@dataclass(frozen=True)
class Pieces:
    """The keys of a layer cut at every span boundary: each span, and its complement, is a sum of whole pieces.

    Attributes
    ----------
    lengths
        Keys in each piece, in order.
    sides
        ``[2, P, pieces]`` float64: 1 where a span holds a piece, and 1 where it does not.
    keys, owner
        ``[T]`` every key of every span, and the span that it stands for.
    """

    lengths: list[int]
    sides: Tensor
    keys: Tensor
    owner: Tensor

    @staticmethod
    def of(spans: list[Span], heads: Heads) -> "Pieces":
        """Cut the keys of ``heads`` at the boundaries of ``spans``, clipped to them (a span may become empty)."""
        first, k, device = heads.extent
        clipped = [(_clip(start - first, k), _clip(stop - first, k)) for start, stop in spans]
        cuts = list(pairwise(sorted({0, k, *(edge for span in clipped for edge in span)})))
        covers = [[start <= lo and hi <= stop for lo, hi in cuts] for start, stop in clipped]
        inside = torch.tensor(covers, dtype=torch.float64)
        keys = torch.cat([torch.arange(start, stop) for start, stop in clipped])
        owner = torch.repeat_interleave(torch.tensor([stop - start for start, stop in clipped]))
        sides = torch.stack([inside, 1 - inside])
        return Pieces([hi - lo for lo, hi in cuts], sides.to(device), keys.to(device), owner.to(device))

    def sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of ``x`` ``[..., k]`` inside and outside each span, ``[..., P]``."""
        by_piece = torch.stack([part.sum(-1) for part in x.split(self.lengths, -1)], -1)
        inside, outside = self.sides.mT
        return by_piece @ inside, by_piece @ outside

    def value_sums(self, heads: Heads) -> Tensor:
        """u_S and u_N = Σ A V inside and outside each span, ``[2, H, Q, P, d]``."""
        H, Q, k = heads.A.shape
        V = heads.values.double()
        rows = heads.A.reshape(len(V), -1, k).split(self.lengths, -1)
        by_piece = torch.stack([A @ part for A, part in zip(rows, V.split(self.lengths, 1), strict=True)])
        return (self.sides @ by_piece.flatten(1)).unflatten(-1, (H, Q, -1)).permute(0, 2, 3, 1, 4)


@dataclass(frozen=True)
class Sums:
    """The laws' terms for every span: scalars ``[H, Q, P]``, vectors ``[H, Q, P, d]``, float64.

    ``centre`` is z′ = u_N / R (NaN where R = 0) and ``shift`` is z′ − z = a_S z′ − u_S (0 where the span is invisible).
    """

    visible: Tensor
    mass: Tensor
    retained: Tensor
    centre: Tensor
    shift: Tensor

    @staticmethod
    def of(heads: Heads, pieces: Pieces) -> "Sums":
        """Sums of every head, query and span."""
        visible = pieces.sums(heads.visible.double())[0] > 0
        mass, retained = pieces.sums(heads.A)
        if heads.sink_mass is not None:
            retained = retained + heads.sink_mass.unsqueeze(-1)
        u_S, u_N = pieces.value_sums(heads)
        centre = u_N / retained.unsqueeze(-1)
        shift = torch.where(visible.unsqueeze(-1), mass.unsqueeze(-1) * centre - u_S, 0.0)
        return Sums(visible, mass, retained, centre, shift)


def _clip(edge: int, k: int) -> int:
    return min(max(edge, 0), k)

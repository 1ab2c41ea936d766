"""Sums inside and outside spans of any lengths and overlaps, by additions only, in float64."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvprobe.spans.inputs import Heads, Span


@dataclass(frozen=True)
class Pieces:
    """The keys of a layer cut at every span boundary: each span, and its complement, is a sum of whole pieces.

    ``spans`` are clipped to the keys that the layer's heads see, so one may be empty. ``inside`` ``[P, pieces]`` is 1
    where a span holds a piece.
    """

    spans: list[Span]
    cuts: list[Span]
    inside: Tensor

    @staticmethod
    def of(spans: list[Span], heads: Heads) -> "Pieces":
        """Cut the keys of ``heads`` at the boundaries of ``spans``."""
        k = heads.A.shape[-1]
        clipped = [(_clip(start - heads.first, k), _clip(stop - heads.first, k)) for start, stop in spans]
        cuts = list(pairwise(sorted({0, k, *(edge for span in clipped for edge in span)})))
        covers = [[start <= lo and hi <= stop for lo, hi in cuts] for start, stop in clipped]
        return Pieces(clipped, cuts, torch.tensor(covers, dtype=torch.float64, device=heads.A.device))


@dataclass(frozen=True)
class Sums:
    """The laws' terms for every span: scalars ``[H, Q, P]``, vectors ``[H, Q, P, d]``, float64.

    ``centre`` is z′ = u_N / R (NaN where R = 0) and ``shift`` is z′ − z = a_S z′ − u_S (0 where the span is invisible).
    """

    visible: Tensor
    mass: Tensor
    retained: Tensor
    value_mass: Tensor
    kept_value_mass: Tensor
    centre: Tensor
    shift: Tensor

    @staticmethod
    def of(heads: Heads, pieces: Pieces, m: Tensor | None = None) -> "Sums":
        """Sums over ``pieces``; without value norms ``m`` ``[H, k]`` the value masses are 0."""
        (evicted, w_S, seen), (kept, w_N, _) = _two_sided_sums(heads, pieces, m)
        visible, mass, retained = seen[..., -1] > 0, evicted[..., -1], kept[..., -1]
        if heads.sink_mass is not None:
            retained = retained + heads.sink_mass.unsqueeze(-1)
        centre = kept[..., :-1] / retained.unsqueeze(-1)
        shift = mass.unsqueeze(-1) * centre - evicted[..., :-1]
        shift = torch.where(visible.unsqueeze(-1), shift, 0.0)
        return Sums(visible, mass, retained, w_S[..., -1], w_N[..., -1], centre, shift)


def _two_sided_sums(heads: Heads, pieces: Pieces, m: Tensor | None) -> Tensor:
    """Σ rows · [V, 1] for the rows A, A m and "visible", inside and outside: ``[2, 3, H, Q, P, d + 1]``.

    One small product a piece: the column of ones makes the plain sums a by-product of the value sums.
    """
    H, Q, k = heads.A.shape
    K, _, d = heads.values.shape
    weighted = torch.zeros_like(heads.A) if m is None else heads.A * m.double().unsqueeze(1)
    rows = torch.stack([heads.A, weighted, heads.visible.double()])
    rows = rows.view(3, K, -1, k).transpose(0, 1).reshape(K, -1, k)
    columns = rows.new_ones(K, k, d + 1)
    columns[..., :-1] = heads.values
    by_piece = torch.stack([rows[..., lo:hi] @ columns[:, lo:hi] for lo, hi in pieces.cuts])
    sides = torch.cat([pieces.inside, 1 - pieces.inside]) @ by_piece.flatten(1)
    return sides.view(2, -1, K, 3, H // K, Q, d + 1).permute(0, 3, 2, 4, 5, 1, 6).reshape(2, 3, H, Q, -1, d + 1)


def _clip(edge: int, k: int) -> int:
    return min(max(edge, 0), k)

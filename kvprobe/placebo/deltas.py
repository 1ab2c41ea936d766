"""The exact change of the attention output that removing key sets makes, head by head and row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.placebo.keysets import KeySet
from kvprobe.placebo.scope import Layer, Scope
from kvprobe.placebo.sums import Cut, Sums


@dataclass(frozen=True)
class Delta:
    """What removing P sets does in one layer; float64.

    Attributes
    ----------
    layer
        The layer.
    sums
        Masses [H, Q, P].
    shift
        [K, P, Q, G, d] z′ − z.
    share
        [Q] share of each row in the average of the first set: 0 where its mask does not touch.
    """

    layer: Layer
    sums: Sums
    shift: Tensor
    share: Tensor

    def per_head(self) -> Tensor:
        """Δo_h = (z′ − z)_h W_O^h, [P, Q, H, D]."""
        W_O = self.layer.heads.w_o.double().unflatten(0, (len(self.shift), -1))
        return torch.einsum("kpqgd,kgde->pqkge", self.shift, W_O).flatten(2, 3)


def deltas(scope: Scope, sets: Sequence[KeySet], *, norms: bool = False) -> Iterator[Delta]:
    """The chosen layers' changes, one layer at a time."""
    share = scope.rows(scope.queries, torch.tensor([sets[0][-1][1]]), sets)[:, 0]
    for layer in scope.visit(norms=norms):
        cut = Cut.of(sets, layer.heads.extent)
        sums = Sums.of(layer, cut)
        yield Delta(layer, sums, sums.shift(layer, cut, exact=True), share.to(layer.heads.A.device))

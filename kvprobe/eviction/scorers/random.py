"""Random scores: the control."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.eviction.layer import Layer
from kvprobe.eviction.scorers.base import Scorer


@dataclass(frozen=True)
class Random(Scorer):
    """Uniform draws for every kept set, by the policy's ``seed``, the layer and the set.

    Drawn on the CPU and looked up by position: the same seed keeps the same entries on any device, in any order of
    documents, and whatever else is in the cache. Two documents of one length keep the same positions.
    """

    name: ClassVar[str] = "random"
    attention: ClassVar[bool] = False

    def score(self, layer: Layer) -> Float[Tensor, "J n"]:
        """See :class:`Scorer`."""
        draws = torch.stack([_draws(layer.seed, layer.index, each, layer.length) for each in range(layer.n_sets)])
        positions = layer.positions.clamp(min=0).repeat_interleave(layer.n_sets // layer.n_kv_heads, 0)
        return draws.to(positions.device).gather(1, positions)


def _draws(seed: int, layer: int, kept_set: int, length: int) -> Tensor:
    # The generator takes 32 bits of seed: a digest of all three numbers keeps neighbours apart.
    digest = blake2b(f"{seed}/{layer}/{kept_set}".encode(), digest_size=4).digest()
    return torch.rand(length, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))

"""One model of one family in one dtype: as kvprobe loads it, and twice in plain transformers."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import tiny
import torch
from edit_oracle import Edited
from oracles import Answer, Plain

from kvprobe import Prompt, load
from kvprobe.errors import CapabilityError

N, SUFFIX = 26, 8
IDS = torch.randint(3, 320, (N,), generator=torch.Generator().manual_seed(0)).tolist()
DONOR = torch.randint(3, 320, (N,), generator=torch.Generator().manual_seed(7)).tolist()
PROMPT, GIVER = Prompt.from_ids(IDS, {"needle": (9, 12)}), Prompt.from_ids(DONOR)
NEEDLE = range(9, 12)
EXACT = 1e-4
"""fp32 logits of size 15 summed in two orders."""

EXPERTS = ("mixtral", "qwen2_moe", "gpt_oss")
"""Rounding flips which experts a token goes to: in half precision their rows are judged by the median, and what
compares runs in other pieces (batches, caches, pads, single heads, kept sets) is left to fp32."""


@dataclass(frozen=True)
class Case:
    """A model under the laws; ``exact`` has its rounded weights in fp32, ``naive`` its own dtype."""

    family: str
    layout: str
    dtype: torch.dtype

    @property
    def folder(self) -> Path:
        return folder(self.family, self.layout)

    @property
    def half(self) -> bool:
        return self.dtype != torch.float32

    @property
    def flips(self) -> bool:
        return self.half and self.family in EXPERTS

    @cached_property
    def model(self):
        return load(self.folder, dtype=self.dtype)

    @cached_property
    def naive(self) -> Plain:
        return Plain(self.folder, self.dtype)

    @cached_property
    def exact(self) -> Plain:
        if not self.half:
            return self.naive
        exact = copy.copy(self.naive)
        exact.hf = copy.deepcopy(self.naive.hf).float()
        return exact

    @cached_property
    def loops(self) -> Edited:
        return Edited(self.folder)

    @cached_property
    def clean(self) -> tuple[Answer, Answer]:
        exact = self.exact(IDS)
        return exact, self.naive(IDS) if self.half else exact

    def table(self, layers=None, heads=None, keys=NEEDLE, first=NEEDLE.stop, n=N) -> torch.Tensor:
        """[L, H, n, n]: −∞ where a query from ``first`` on loses keys, on some layers and heads."""
        geometry = self.model.geometry
        table = torch.zeros(geometry.n_layers, geometry.n_heads, n, n)
        for layer in range(geometry.n_layers) if layers is None else layers:
            for head in range(geometry.n_heads) if heads is None else heads:
                for key in keys:
                    table[layer, head, first:, key] = -torch.inf
        return table

    def agree(self, mine: torch.Tensor, table: torch.Tensor | None, rows=slice(None)) -> None:
        """Logits of prompt rows equal plain transformers' under a 4-D mask (None: no mask)."""
        exact = self.clean[0] if table is None else self.exact(IDS, table)
        naive = exact if not self.half else self.clean[1] if table is None else self.naive(IDS, table)
        self.near(mine, exact.logits[rows], naive.logits[rows])

    def near(self, mine: torch.Tensor, exact: torch.Tensor, naive: torch.Tensor) -> None:
        """In fp32 equal; in half precision at most twice as far off as transformers itself in that dtype."""
        assert mine.shape == exact.shape and not mine.isnan().any()
        error, budget = (mine.float() - exact.float()).abs(), (naive.float() - exact.float()).abs()
        if not self.half:
            assert float(error.max()) <= EXACT, f"off by {float(error.max()):.2g}"
        elif self.flips:
            assert typical(error) <= 2 * typical(budget), f"{typical(error):.2g} > 2 · {typical(budget):.2g}"
        else:
            assert float(error.mean()) <= 2 * float(budget.mean())
            largest = max(float(budget.max()), self.own_error if exact.dim() == 2 else 0.0)
            assert float(error.max()) <= 2 * largest, f"{float(error.max()):.2g} > 2 · {largest:.2g}"

    @cached_property
    def own_error(self) -> float:
        """The largest error of transformers' own logits without a mask: a few rows alone say little about a largest."""
        exact, naive = self.clean
        return float((naive.logits.float() - exact.logits).abs().max())


def typical(error: torch.Tensor) -> float:
    """The median of the rows' largest errors."""
    return float(error.flatten(0, -2).amax(-1).median())


@cache
def folder(family: str, layout: str) -> Path:
    """A saved tiny model; kept as long as the process."""
    target = Path(_scratch().name) / layout / family
    return tiny.save(family, target, **tiny.layouts(family).get(layout, tiny.SHAPES.get((family, layout))))


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="conformance-")


@cache
def refused(family: str) -> CapabilityError:
    """What load() says of a family that it must refuse."""
    target = tiny.save(family, Path(_scratch().name) / "refused" / family)
    try:
        load(target)
    except CapabilityError as error:
        assert "\n" not in str(error)
        return error
    raise AssertionError(f"{family} was accepted")

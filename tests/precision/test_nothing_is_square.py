"""What is worked out from positions alone, of a long prompt: no tensor ever holds queries × keys."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvprobe.interventions import KeepMask, KVMask, ValueGate
from kvprobe.interventions.plan import Scene, compile_arms
from kvprobe.receipts import expected_cells

N, HEADS = 8192, 4
SCENE = Scene(N, 64, 2, HEADS, (None, 128), n_kv_heads=2, d_model=32, head_dim=8)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in tree_leaves(result)
                 if isinstance(tensor, torch.Tensor)]  # fmt: skip
        self.numel = max(self.numel, *sizes, 0)
        return result


def met(first, stop, start, n, window):
    """Cells of queries first … n − 1 over keys start … stop − 1, by counting."""
    return sum(max(0, min(stop, q + 1) - max(start, q - window + 1)) for q in range(first, n))


KEEP = torch.rand(2, 2, 6000, generator=torch.Generator().manual_seed(0)) > 0.5
SPAN = (100, 5000)
ARMS = {
    "a mask": (KVMask(SPAN, queries="after"), lambda w: HEADS * met(5000, 5000, 100, N, w)),
    "a mask of some heads": (KVMask(SPAN, heads=[1, 2], queries="after"), lambda w: 2 * met(5000, 5000, 100, N, w)),
    "an evicted cache": (KeepMask(KEEP), None),
}


@pytest.mark.parametrize("name", ARMS)
def test_receipts_of_masks(name):
    mask, counted = ARMS[name]
    with Largest() as largest:
        plan = compile_arms([[mask]], SCENE)
        cells = expected_cells(plan, 0, torch.arange(N), SCENE.windows, HEADS)
    assert largest.numel <= 1 << 23 and largest.numel < N * N / 8
    if counted is not None:
        assert cells == counted(math.inf) + counted(128)
    else:
        lost = (~KEEP).repeat_interleave(2, 1).sum((0, 1))  # heads × layers that lost each key
        full = int((~KEEP[0]).sum()) * 2 * (N - 6000)
        near = sum(int((~KEEP[1])[:, max(0, q - 127) : 6000].sum()) * 2 for q in range(6000, 6000 + 127))
        assert cells == full + near and int(lost.sum()) > 0


def test_receipts_of_gates():
    with Largest() as largest:
        plan = compile_arms([[ValueGate((100, 5000), queries=range(5000, N))]], SCENE)
        found = [plan.effects[layer][0][0].expected(torch.arange(N), window, HEADS)
                 for layer, window in enumerate(SCENE.windows)]  # fmt: skip
    assert largest.numel <= 1 << 23
    assert found == [HEADS * met(5000, 5000, 100, N, math.inf), HEADS * met(5000, 5000, 100, N, 128)]

"""projected_norm holds one tile, never the projected values."""

import pytest
import torch
from peak_memory import Peak

from kvprobe_kernels import projected_norm
from kvprobe_kernels.projected_norm import torch_impl


def tile_bytes():
    return torch_impl.CPU_THREAD_TILE_BYTES * torch.get_num_threads()


def test_the_peak_sees_what_the_plain_line_holds():
    V, W_O = torch.randn(4000, 64), torch.randn(64, 576)
    with Peak() as memory:
        (V @ W_O).abs().sum(-1)
    assert 2 * 4000 * 576 * 4 <= memory.peak < 2.1 * 4000 * 576 * 4
    assert memory.live == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [576, 4096])
@pytest.mark.parametrize("group", ["mean", "none"])
@pytest.mark.parametrize("p", [1, 2])
def test_no_more_than_two_tiles(p, group, D, dtype):
    V, W_O = torch.randn(1, 8000, 64).to(dtype), torch.randn(2, 64, D).to(dtype)
    with Peak() as memory:
        norms = projected_norm(V, W_O, p, group)
    # For p = 2 one head's projection at a time is read in float64, and leaves its d × d factors.
    factored = (2 * 64 * D + 4 * 2 * 64 * 64) * 8 if p == 2 else 0
    assert memory.peak - norms.nbytes <= 2 * tile_bytes() + factored
    assert memory.peak < 8000 * D * 4 / 2, "as much as the projected values of one head"


def test_the_peak_does_not_grow_with_n():
    W_O = torch.randn(1, 64, 576)
    extra = []
    for n in (20000, 80000):
        V = torch.randn(1, n, 64)
        with Peak() as memory:
            norms = projected_norm(V, W_O)
        extra.append(memory.peak - norms.nbytes)
    assert extra[1] <= 1.1 * extra[0]

"""Window scores of long prompts hold a bounded block of logits, never heads x window x keys."""

import pytest
import torch
from peak_memory import Peak

from kvprobe_kernels import window_scores

HEADS, WINDOW = 8, 32


def drawn(n, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(HEADS, WINDOW, 32, generator=generator)
    return queries.to(dtype), torch.randn(2, n, 32, generator=generator).to(dtype)


def test_the_peak_sees_what_a_dense_softmax_holds():
    Q, K = drawn(4000)
    with Peak() as memory:
        (Q @ K.repeat_interleave(4, 0).mT).softmax(-1).mean(-2)
    assert 2 * HEADS * WINDOW * 4000 * 4 <= memory.peak < 3 * HEADS * WINDOW * 4000 * 4
    assert memory.live == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_heads_window_and_keys(dtype):
    n = 65536
    Q, K = drawn(n, dtype)
    with Peak() as memory:
        window_scores(Q, K, alive=torch.ones(2, n, dtype=torch.bool))
    columns = HEADS * n * 4
    assert memory.peak < (8 << 20) + 6 * columns < HEADS * WINDOW * n * 4 / 2, f"{memory.peak / 2**20:.1f} MiB"

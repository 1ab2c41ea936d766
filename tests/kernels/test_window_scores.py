"""Window scores: against a dense fp64 formula, and the laws they obey, on every backend."""

import math

import pytest
import torch

from kvprobe_kernels import KernelError, window_scores
from kvprobe_kernels.window_scores import torch_impl

INF = math.inf
EXACT = {"rtol": 1e-5, "atol": 1e-8}


def dense(Q, K, pool="avg", kernel=5, group="mean", *, scale=None, alive=None, dtype=torch.float64):
    """All logits at once, K repeated over its group, and a pooled position as a loop writes it."""
    (heads, w, d), n = Q.shape[-3:], K.shape[-2]
    owner = torch.arange(heads) // (heads // K.shape[-3])
    logits = (d**-0.5 if scale is None else scale) * Q.to(dtype) @ K.to(dtype)[..., owner, :, :].mT
    seen = torch.arange(n) <= torch.arange(n - w, n)[:, None]
    if alive is not None:
        seen = seen & alive[..., owner, None, :]
    weights = torch.nan_to_num(logits.double().masked_fill(~seen, -INF).softmax(-1), nan=0.0)
    scores = weights.to(dtype)[..., : n - w].mean(-2)
    if pool != "none":
        half, length = kernel // 2, n - w
        near = [scores[..., max(0, i - half) : min(length, i + half + 1)] for i in range(length)]
        pooled = [x.amax(-1) if pool == "max" else x.sum(-1) / kernel for x in near]
        scores = torch.stack(pooled, -1) if near else scores
    if group == "none":
        return scores
    scores = scores.unflatten(-2, (K.shape[-3], -1))
    return scores.mean(-2) if group == "mean" else scores.amax(-2)


def drawn(*, lead=(), heads=4, kv_heads=2, w=5, n=37, d=8, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(*lead, heads, w, d, generator=generator) * 2
    return queries.to(dtype), torch.randn(*lead, kv_heads, n, d, generator=generator).to(dtype)


def alive_in(K, share=0.6, seed=1):
    return torch.rand(K.shape[:-1], generator=torch.Generator().manual_seed(seed)) < share


@pytest.mark.parametrize("kernel", [1, 3, 5, 7, 63])
@pytest.mark.parametrize("pool", ["avg", "max", "none"])
def test_pooling_equals_the_dense_formula(backend, pool, kernel):
    Q, K = drawn()
    got = window_scores(Q, K, pool, kernel, backend=backend)
    torch.testing.assert_close(got.double(), dense(Q, K, pool, kernel), **EXACT)


@pytest.mark.parametrize("group", ["mean", "max", "none"])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_heads_of_every_sharing(backend, kv_heads, group):
    Q, K = drawn(heads=6, kv_heads=kv_heads)
    for pool in ("avg", "max"):
        got = window_scores(Q, K, pool, 3, group, backend=backend)
        assert got.shape == (6 if group == "none" else kv_heads, 32)
        torch.testing.assert_close(got.double(), dense(Q, K, pool, 3, group), **EXACT)


@pytest.mark.parametrize(
    ("n", "w", "d"), [(2, 1, 1), (17, 1, 3), (66, 33, 64), (40, 39, 16), (129, 16, 20), (255, 32, 80), (507, 7, 33)]
)
def test_awkward_sizes(backend, n, w, d):
    Q, K = drawn(heads=2, kv_heads=1, n=n, w=w, d=d)
    alive = alive_in(K)
    for mask in (None, alive):
        got = window_scores(Q, K, alive=mask, backend=backend)
        torch.testing.assert_close(got.double(), dense(Q, K, alive=mask), **EXACT)


def test_more_keys_than_one_range_or_tile(backend):
    Q, K = drawn(heads=2, kv_heads=1, n=2300, w=3, d=8)
    alive = alive_in(K)
    alive[:, :2100] = False
    torch.testing.assert_close(window_scores(Q, K, backend=backend).double(), dense(Q, K), **EXACT)
    got = window_scores(Q, K, alive=alive, backend=backend)
    torch.testing.assert_close(got.double(), dense(Q, K, alive=alive), **EXACT)


@pytest.mark.parametrize("block_bytes", [1, 500, 3_000, 20_000, 1 << 20])
@pytest.mark.parametrize("masked", [False, True])
def test_every_block_size_gives_the_same_scores(block_bytes, masked):
    # From one key a tile, over tiles that end inside the window, to several kv heads in one product.
    Q, K = drawn(lead=(2,), heads=6, kv_heads=3)
    alive = alive_in(K) if masked else None
    flat = None if alive is None else alive.flatten(0, 1)
    queries, keys = Q.reshape(6, 2, 5, 8), K.flatten(0, 1)
    got = torch_impl.window_scores(queries, keys, flat, 8**-0.5, "avg", 5, "mean", block_bytes=block_bytes)
    torch.testing.assert_close(got.view(2, 3, 32).double(), dense(Q, K, alive=alive), **EXACT)


@pytest.mark.parametrize("group", ["mean", "none"])
def test_a_window_of_everything_leaves_nothing(backend, group):
    Q, K = drawn(lead=(3,), w=9, n=9)
    got = window_scores(Q, K, group=group, backend=backend)
    assert got.shape == (3, 4 if group == "none" else 2, 0) and got.dtype == torch.float32


def test_batch_is_one_by_one(backend):
    Q, K = drawn(lead=(2, 3))
    alive = alive_in(K)
    got = window_scores(Q, K, "max", 3, alive=alive, backend=backend)
    assert got.shape == (2, 3, 2, 32)
    for i in range(2):
        for j in range(3):
            alone = window_scores(Q[i, j], K[i, j], "max", 3, alive=alive[i, j], backend=backend)
            torch.testing.assert_close(got[i, j], alone, rtol=1e-6, atol=1e-9)
    assert window_scores(Q[:0], K[:0], backend=backend).shape == (0, 3, 2, 32)


def test_an_evicted_key_is_as_if_it_were_not_there(backend):
    Q, K = drawn(kv_heads=4)
    alive = alive_in(K[:1]).expand(4, -1)
    got = window_scores(Q, K, "none", group="none", alive=alive, backend=backend)
    assert bool((got[~alive[:, :32]] == 0).all())
    # The window's keys stay: those that are dead are made unreachable in a prompt of the living ones alone.
    alive = alive | (torch.arange(37) >= 32)
    got = window_scores(Q, K, "none", group="none", alive=alive, backend=backend)
    fewer = window_scores(Q, K[:, alive[0]], "none", group="none", backend=backend)
    torch.testing.assert_close(got[:, alive[0, :32]], fewer, rtol=1e-5, atol=1e-8)


def test_a_dead_key_is_zero_before_pooling(backend):
    Q, K = drawn(heads=1, kv_heads=1)
    alive = torch.ones(1, 37, dtype=torch.bool)
    alive[0, 10] = False
    raw = window_scores(Q, K, "none", alive=alive, backend=backend)[0]
    pooled = window_scores(Q, K, "avg", 3, alive=alive, backend=backend)[0]
    assert raw[10] == 0
    torch.testing.assert_close(pooled[10], (raw[9] + raw[11]) / 3, rtol=1e-6, atol=0)
    torch.testing.assert_close(pooled[0], (raw[0] + raw[1]) / 3, rtol=1e-6, atol=0)


def test_rows_and_blocks_without_a_living_key(backend):
    Q, K = drawn(heads=2, kv_heads=2, n=200, w=4)
    alive = torch.zeros(2, 200, dtype=torch.bool)
    alive[0, 198] = True  # the first tiles are dead, and so are the rows of positions 196 and 197
    alive[1, [195, 197, 198, 199]] = True  # only the last key before the window; position 196 sees no other
    got = window_scores(Q, K, "none", alive=alive, backend=backend)
    assert bool((got[0] == 0).all()) and bool((got[1, :195] == 0).all()) and got[1, 195] > 0
    torch.testing.assert_close(got.double(), dense(Q, K, "none", alive=alive), **EXACT)
    assert got[1, 195] >= 1 / 4
    alive[0, :100] = True
    alive[0, 198] = False
    alive[1] = False
    got = window_scores(Q, K, alive=alive, backend=backend)
    torch.testing.assert_close(got.double(), dense(Q, K, alive=alive), **EXACT)
    assert bool((got[1] == 0).all())


@pytest.mark.parametrize("shift", [-2e5, -1e4, 1e4])
def test_a_shift_of_all_logits_changes_nothing(backend, shift):
    # Integers in both, a quarter as the scale: every logit is exact in fp32, at any of these shifts.
    generator = torch.Generator().manual_seed(0)
    Q = torch.randint(-2, 3, (4, 3, 8), generator=generator).float()
    K = torch.randint(-2, 3, (2, 90, 8), generator=generator).float()
    alive = alive_in(K)
    plain = dense(Q[..., 1:], K[..., 1:], "none", scale=0.25, alive=alive)
    Q[..., 0] = 1
    # A dead key's own logit is 2e5, which must not matter.
    K[..., 0] = torch.where(alive, 4 * shift, 8e5)
    got = window_scores(Q, K, "none", scale=0.25, alive=alive, backend=backend)
    torch.testing.assert_close(got.double(), plain, **EXACT)
    assert bool((got[~alive[:, :87]] == 0).all())


def test_one_key_takes_all(backend):
    Q, K = torch.ones(1, 2, 4), torch.zeros(1, 30, 4)
    K[0, 7] = 1e4
    got = window_scores(Q, K, backend=backend)[0]
    expected = torch.zeros(28)
    expected[5:10] = 0.2
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_cost_nothing_more(backend, dtype):
    Q, K = drawn(n=255, w=16, d=40, dtype=dtype)
    Q = Q * 2
    truth = dense(Q, K)
    got = window_scores(Q, K, backend=backend)
    naive = dense(Q, K, dtype=dtype).double()
    budget = ((naive - truth) / truth).abs().max()
    error = ((got.double() - truth) / truth).abs().max()
    assert got.dtype == torch.float32 and error < budget / 30, (error, budget)
    torch.testing.assert_close(got.double(), truth, **EXACT)


def test_fp64_inputs_stay_in_fp64_or_are_refused(backend):
    Q, K = drawn(dtype=torch.float64)
    if backend == "triton":
        with pytest.raises(KernelError, match=r"computes in fp32, given float64: backend='torch'"):
            window_scores(Q, K, backend=backend)
        return
    got = window_scores(Q, K.float(), backend=backend)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, dense(Q, K), rtol=1e-12, atol=1e-15)


def test_what_the_process_chose_for_products_is_neither_used_nor_changed():
    Q, K = drawn(n=300, d=64, dtype=torch.bfloat16)
    Q, K = Q.float() * 1.01, K.float() * 1.01
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = window_scores(Q, K)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(got.double(), dense(Q, K), **EXACT)


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_permuting_query_heads_inside_a_group(backend, pool):
    Q, K = drawn(heads=6, kv_heads=2)
    order = torch.tensor([2, 0, 1, 3, 5, 4])
    for group in ("mean", "max"):
        before, after = (window_scores(q, K, pool, 3, group, backend=backend) for q in (Q, Q[order]))
        torch.testing.assert_close(before, after, rtol=1e-6, atol=0)
    before, after = (window_scores(q, K, pool, 3, "none", backend=backend) for q in (Q, Q[order]))
    torch.testing.assert_close(before[order], after, rtol=1e-6, atol=0)
    # Across groups a permutation does matter: head h reads kv head h // G.
    across = window_scores(Q.roll(3, 0), K, pool, 3, "none", backend=backend).roll(-3, 0)
    assert (across - before).abs().max() > 0.01


def test_scores_are_the_mass_outside_the_window(backend):
    Q, K = drawn()
    raw = window_scores(Q, K, "none", group="none", backend=backend)
    logits = 8**-0.5 * Q.double() @ K.double().repeat_interleave(2, 0).mT
    logits[..., 32:] += torch.full((5, 5), -INF).triu(1)
    mass = 1 - logits.softmax(-1)[..., 32:].sum(-1).mean(-1)
    torch.testing.assert_close(raw.double().sum(-1), mass, rtol=1e-5, atol=0)


def test_the_order_is_pool_then_group(backend):
    Q, K = drawn()
    heads = window_scores(Q, K, "max", 5, "none", backend=backend)
    mean = window_scores(Q, K, "max", 5, backend=backend)
    torch.testing.assert_close(mean, heads.unflatten(0, (2, 2)).mean(1), rtol=1e-6, atol=0)
    largest = window_scores(Q, K, "max", 5, "max", backend=backend)
    assert torch.equal(largest, heads.unflatten(0, (2, 2)).amax(1))
    raw = window_scores(Q, K, "none", backend=backend)
    pooled_late = torch.nn.functional.max_pool1d(raw[None], 5, 1, 2)[0]
    assert (mean - pooled_late).max() > 1e-4


def test_views_are_read_and_nothing_is_written(backend):
    Q, K = drawn(lead=(2,))
    strided = K.transpose(1, 2).contiguous().transpose(1, 2), K.mT.contiguous().mT
    expected = window_scores(Q, K, backend=backend)
    for keys in strided:
        before = keys.clone()
        got = window_scores(Q.requires_grad_(), keys, backend=backend)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)
        assert torch.equal(keys, before) and not got.requires_grad

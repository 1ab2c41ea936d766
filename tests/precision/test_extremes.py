"""Attention where 16 bits break: huge, overflowing and cancelling logits, first keys gone, one key, whole windows gone.

Every case is judged against loops in float64 over the operands as they are (already rounded to 16 bits).
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from kvprobe import attention
from kvprobe.attention import Run
from kvprobe.twopart import LayerSpec, layer_logits

H, K, D = 4, 2, 8
MODULE = SimpleNamespace(layer_idx=0, training=False, is_causal=True, num_key_value_groups=H // K)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])


class Table:
    """A bias [n, n] for all heads, as an arm of a run."""

    def __init__(self, values):
        self.values = values
        self.columns = (values != 0).any(0).nonzero()[:, 0]

    def at(self, positions):
        return self.values[positions][None][..., self.columns]


def draw(n, dtype, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(1, heads, n, D, generator=g) * scale).to(dtype) for heads in (H, K, K)]


def run(q, k, v, spec, table=None, cut=0):
    """Outputs [t, H, D] and the record; the first ``cut`` keys are a shared prefix, their queries are not run."""
    prefix = [(k[0, :, :cut], v[0, :, :cut])] if cut else None
    job = Run(prefix=prefix, start=cut, biases={} if table is None else {0: {0: Table(table)}})
    with attention.active(job):
        out, _ = attention.attention_forward(
            MODULE, q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], None,
            scaling=spec.scale, sliding_window=spec.window, softcap=spec.softcap, s_aux=spec.sink,
        )  # fmt: skip
    return out[0], job.records.get(0)


def slow(q, k, v, spec, table=None):
    """Outputs [n, H, D], logits [H, n, n] and R [H, n] in float64, by loops."""
    n = q.shape[2]
    out, rows, R = torch.zeros(n, H, D).double(), torch.full((H, n, n), -torch.inf).double(), torch.ones(H, n).double()
    for h in range(H):
        for i in range(n):
            for j in range(i + 1):
                if spec.window is None or i - j < spec.window:
                    s = spec.scale * float(q[0, h, i].double() @ k[0, h // (H // K), j].double())
                    rows[h, i, j] = s if spec.softcap is None else spec.softcap * math.tanh(s / spec.softcap)
            biased = rows[h, i] + (0 if table is None else table[i].double())
            top = max(float(rows[h, i].max()), -1e300)
            kept = (biased - top).exp()
            R[h, i] = kept.sum() / (rows[h, i] - top).exp().sum()
            if bool((biased > -torch.inf).any()):
                out[i, h] = (biased - biased.max()).exp() @ v[0, h // (H // K)].double()
                out[i, h] /= (biased - biased.max()).exp().sum()
    return out, rows, R


def check(q, k, v, spec, table=None, cut=0):
    """Outputs within the rounding of their dtype, logits rows and R in fp32, dead keys at exactly 0."""
    mine, record = run(q, k, v, spec, table, cut)
    reference, rows, R = slow(q, k, v, spec, table)
    assert not mine.isnan().any()
    slack = max(4e-6, torch.finfo(q.dtype).eps) * float(v.abs().max())
    # What fp32 knows of a logit: its terms count, which may be larger than their sum.
    size = float(q.double().abs().amax() * k.double().abs().amax() * spec.scale) * D * 6e-8
    assert_close(mine.double(), reference[cut:], atol=slack + 2 * size * float(v.abs().max()), rtol=0)
    logits = layer_logits(q[0], k[0], spec, torch.arange(q.shape[2]))
    assert logits.dtype == torch.float32 and torch.equal(logits.isneginf(), rows.isneginf())
    assert_close(logits.double(), rows, atol=1e-6 + size, rtol=0)
    if table is not None:
        assert record.retained.dtype == torch.float32 and float(record.masked_weight) == 0
        assert_close(record.retained[0].double(), R[:, cut:], rtol=1e-5 + 4 * size, atol=0)
    return mine


def gone(n, keys, queries=slice(None)):
    table = torch.zeros(n, n)
    table[queries, keys] = -torch.inf
    return table


def alive(table):
    """The same with every row's own key kept."""
    return table.fill_diagonal_(0)


SPECS = [LayerSpec(0.35), LayerSpec(0.35, window=4), LayerSpec(0.35, softcap=2.0)]


@every_dtype
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("cut", [0, 5])
def test_first_keys_gone_and_one_key_left(dtype, spec, cut):
    q, k, v = draw(12, dtype)
    check(q, k, v, spec, alive(gone(12, slice(0, 4))), cut)
    check(q, k, v, spec, alive(gone(12, slice(0, 12))), cut)  # every row sees itself alone
    one = check(q, k, v, spec, alive(gone(12, slice(0, 12))), 5)
    assert_close(one, v[0, :, 5:].repeat_interleave(2, 0).transpose(0, 1), atol=0, rtol=torch.finfo(dtype).eps)


@every_dtype
@pytest.mark.parametrize("n", [1, 4, 5, 17])
@pytest.mark.parametrize("spec", SPECS)
def test_one_token_the_window_and_one_more(dtype, n, spec):
    check(*draw(n, dtype), spec)
    check(*draw(n, dtype), spec, alive(gone(n, slice(0, n // 2))))


@every_dtype
@pytest.mark.parametrize("window", [None, 1, 4])
def test_a_whole_row_gone_is_zero_and_sees_nothing_later(dtype, window):
    q, k, v = draw(12, dtype)
    table = gone(12, slice(0, 8), 7)
    spec = LayerSpec(0.35, window=window)
    mine = check(q, k, v, spec, table)
    assert bool((mine[7] == 0).all())
    later = [part.clone() for part in (k, v)]
    later[0][:, :, 8:], later[1][:, :, 8:] = 60.0, -6e4
    assert torch.equal(run(q, *later, spec, table)[0][:8], mine[:8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [2e5, -2e5])
def test_huge_logits(dtype, offset):
    """A sentinel of −1e5 would be larger than these logits: weights must be exactly 0, later tokens unseen."""
    q, k, v = draw(12, dtype, scale=0.5)
    q[..., 0], k[..., 0] = 1024.0, offset / 1024  # exact in 16 bits up to a rounding that all keys share
    spec, table = LayerSpec(1.0), alive(gone(12, slice(2, 6)))
    mine, record = run(q, k, v, spec, table)
    assert float(record.masked_weight) == 0 and bool(mine.isfinite().all())
    reference, rows, _ = slow(q, k, v, spec, table)
    # An fp32 logit of 2e5 is known to 1/64: weights to 3 %.
    assert_close(mine.double(), reference, atol=0.1 * float(v.abs().max()), rtol=0)
    assert torch.equal(layer_logits(q[0], k[0], spec, torch.arange(12)).isneginf(), rows.isneginf())
    others = [0, 1, *range(6, 12)]  # those whose own key is not among the masked ones
    v[:, :, 2:6] = 1e4
    assert torch.equal(run(q, k, v, spec, table)[0][others], mine[others])
    v[:, :, 9:], k[:, :, 9:] = 1e4, 300.0
    assert torch.equal(run(q, k, v, spec, table)[0][6:9], mine[6:9])


def test_a_product_beyond_fp16():
    """q·k of 1.4e5 is infinite in fp16 and one fp32 logit here; the largest key takes all."""
    q, k, v = draw(6, torch.float16)
    q[:] = 96.0
    k[:] = torch.arange(1.0, 7)[None, None, :, None].half() * 32
    assert bool((q[0, 0] @ k[0, 0].T).isinf().any())
    mine = check(q, k, v, LayerSpec(1.0))
    assert_close(mine, v[0].repeat_interleave(2, 0).transpose(0, 1), atol=0, rtol=0)
    logits = layer_logits(q[0], k[0], LayerSpec(1.0), torch.arange(6))
    assert float(logits[0, -1, -1]) == 96 * 192 * 8
    table = gone(6, slice(1, 5), 5)
    table[5, 5] = -torch.inf  # only key 0 is left for the last row, 120,000 below
    last, record = run(q, k, v, LayerSpec(1.0), table)
    assert_close(last[5], v[0, :, 0].repeat_interleave(2, 0), atol=0, rtol=0)
    assert bool((record.retained[0, :, 5] == 0).all()) and float(record.masked_weight) == 0


@every_dtype
def test_near_cancelling_queries(dtype):
    """Terms of 4,096 that leave logits of order 1: fp32 sums keep them, where 16-bit sums keep nothing."""
    g = torch.Generator().manual_seed(3)
    q = torch.full((1, H, 9, D), 64.0).to(dtype)
    k = torch.full((1, K, 9, D), 64.0).to(dtype)
    k[..., D // 2 :] = -64.0
    q[..., 0] = (torch.randint(-2, 3, (1, H, 9), generator=g) * 0.5 + 64).to(dtype)
    v = draw(9, dtype)[2]
    check(q, k, v, LayerSpec(0.1), alive(gone(9, slice(0, 3))))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_the_lowest_number_twice(dtype):
    """finfo.min twice is −∞ in 16 bits, and the softmax of a row of −∞ NaN: here no mask is a sum of sentinels."""
    low = torch.full((3,), torch.finfo(dtype).min, dtype=dtype)
    assert bool((low + low).isinf().all()) and bool((low + low).softmax(-1).isnan().all())
    q, k, v = draw(8, dtype)
    twice = gone(8, slice(0, 3), 2)  # all that query 2 sees is cut, by two edits that overlap
    twice[2, :2] += -torch.inf
    mine, record = run(q, k, v, LayerSpec(0.35), twice)
    assert bool((mine[2] == 0).all()) and not mine.isnan().any() and not record.retained.isnan().any()


@every_dtype
@pytest.mark.parametrize("beta", [1e-4, 0.7, 30.0])
def test_finite_biases_are_not_rounded_to_16_bits(dtype, beta):
    q, k, v = draw(10, dtype, seed=4)
    table = torch.zeros(10, 10)
    table[:, 2:5] = -beta
    _, record = run(q, k, v, LayerSpec(0.35), table)
    _, _, R = slow(q, k, v, LayerSpec(0.35), table)
    assert_close(1 - record.retained[0].double(), 1 - R, atol=3e-7, rtol=1e-3)

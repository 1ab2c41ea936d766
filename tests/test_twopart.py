"""Two-part attention against fp64 loops: windows, soft-caps, learned sinks, prefixes, and every kind of bias."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kvprobe import attention, twopart
from kvprobe.attention import Run
from kvprobe.twopart import LayerSpec

HEADS, KV_HEADS, D, DV = 6, 2, 8, 5
MODULE = SimpleNamespace(layer_idx=0, training=False, is_causal=True, num_key_value_groups=HEADS // KV_HEADS)


@dataclass(frozen=True)
class Table:
    """A bias as a whole table [H, n, n]; ``columns`` are those that hold any."""

    values: Tensor

    @property
    def columns(self):
        return (self.values != 0).any(0).any(0).nonzero()[:, 0]

    def at(self, positions):
        return self.values[:, positions][..., self.columns]


@dataclass(frozen=True)
class Operands:
    """query [B, H, t, d], key and value [B, K, m, ·] and the prefix ([K, p, d], [K, p, d_v]) or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    prefix: tuple[Tensor, Tensor] | None

    @property
    def first(self):
        return self.p + self.key.shape[2] - self.query.shape[2]

    @property
    def p(self):
        return 0 if self.prefix is None else self.prefix[0].shape[1]


def operands(seed=0, batch=3, t=4, m=6, p=7, scale=1.5):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g) * scale  # noqa: E731
    prefix = (draw(KV_HEADS, p, D), draw(KV_HEADS, p, DV)) if p else None
    return Operands(draw(batch, HEADS, t, D), draw(batch, KV_HEADS, m, D), draw(batch, KV_HEADS, m, DV), prefix)


def run_fast(x, spec, tables):
    """z [B, t, H, d_v] and the layer's record."""
    run = Run(prefix=None if x.prefix is None else [x.prefix], start=x.first, biases={0: tables} if tables else {})
    with attention.active(run):
        z, _ = attention.attention_forward(
            MODULE,
            x.query,
            x.key,
            x.value,
            None,
            scaling=spec.scale,
            sliding_window=spec.window,
            softcap=spec.softcap,
            s_aux=spec.sink,
        )
    return z, run.records.get(0)


def slow_row(x, spec, table, b, h, row):
    """One output row, its retained mass and the cells met, by loops over keys in fp64."""
    at, kv = x.first + row, h // (HEADS // KV_HEADS)
    q = x.query[b, h, row].tolist()
    keys, values = x.key[b, kv].tolist(), x.value[b, kv].tolist()
    if x.prefix is not None:
        keys, values = x.prefix[0][kv].tolist() + keys, x.prefix[1][kv].tolist() + values
    kept, everything, cells, z = [], [], 0, [0.0] * DV
    sink = None if spec.sink is None else float(spec.sink[h])
    logits = []
    for j in range(at + 1):
        if spec.window is not None and at - j >= spec.window:
            continue
        s = spec.scale * math.fsum(a * c for a, c in zip(q, keys[j], strict=True))
        logits.append((j, s if spec.softcap is None else spec.softcap * math.tanh(s / spec.softcap)))
    top = max([s for _, s in logits] + ([] if sink is None else [sink]))
    for j, s in logits:
        bias = 0.0 if table is None else float(table[h, at, j])
        cells += bias < 0
        weight = math.exp(s - top)
        everything.append(weight)
        kept.append(weight * math.exp(bias))
        z = [a + kept[-1] * v for a, v in zip(z, values[j], strict=True)]
    rest = [] if sink is None else [math.exp(sink - top)]
    total = math.fsum(kept + rest)
    return [a / total if total else 0.0 for a in z], total / math.fsum(everything + rest), cells


def check(x, spec, tables, tolerance=1e-5):
    z, record = run_fast(x, spec, {arm: Table(values) for arm, values in tables.items()})
    assert not z.isnan().any()
    for b in range(x.query.shape[0]):
        cells = 0
        for h in range(HEADS):
            for row in range(x.query.shape[2]):
                mine, retained, met = slow_row(x, spec, tables.get(b), b, h, row)
                assert_close(z[b, row, h], torch.tensor(mine), atol=tolerance, rtol=tolerance)
                if tables:
                    assert_close(float(record.retained[b, h, row]), retained, atol=1e-6, rtol=1e-5)
                cells += met
        if tables:
            assert int(record.reached[b]) == cells
    if tables:
        assert bool((record.masked_weight == 0).all())


def random_tables(seed, n, arms=(1, 2)):
    """Arm 1: −∞ on a random half, whole rows of one head included; arm 2: β from 0.001 to 20 on a third."""
    g = torch.Generator().manual_seed(seed)
    hard = torch.where(torch.rand(HEADS, n, n, generator=g) < 0.5, -torch.inf, 0.0)
    hard[3, n - 2] = -torch.inf
    strength = 10 ** (torch.rand(HEADS, n, n, generator=g) * 4.3 - 3)
    soft = torch.where(torch.rand(HEADS, n, n, generator=g) < 0.3, -strength, torch.zeros(()))
    return {arm: table for arm, table in zip(arms, (hard, soft), strict=True)}


@pytest.mark.parametrize("p", [0, 1, 7, 13])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize(("softcap", "sink"), [(None, False), (2.0, False), (None, True), (2.0, True)])
def test_equals_the_slow_line(p, window, softcap, sink):
    x = operands(seed=p, p=p, t=4, m=6)
    spec = LayerSpec(0.35, window, softcap, torch.linspace(-2, 3, HEADS) if sink else None)
    check(x, spec, {})
    check(x, spec, random_tables(p, p + 6))


@pytest.mark.parametrize(("t", "m"), [(1, 1), (1, 9), (6, 6), (40, 40)])
def test_equals_the_slow_line_in_decoding_and_in_long_runs(t, m):
    x = operands(seed=t, batch=3, t=t, m=m, p=5)
    check(x, LayerSpec(0.35, 4), random_tables(t, 5 + m))
    check(x, LayerSpec(0.35), random_tables(t, 5 + m))


def test_without_prefix_and_bias_a_plain_layer_goes_through_sdpa(monkeypatch):
    x = operands(p=0, t=6, m=6)
    check(x, LayerSpec(0.35), {})
    monkeypatch.setattr(attention, "_sdpa", lambda *a: pytest.fail("SDPA"))
    check(x, LayerSpec(0.35, window=6), {})
    check(operands(p=3, t=6, m=6), LayerSpec(0.35), {})


@pytest.mark.parametrize("limit", [1, 4000, 9000])
@pytest.mark.parametrize("window", [None, 9])
def test_chunks_change_nothing(monkeypatch, limit, window):
    x, spec = operands(batch=5, t=50, m=53, p=20), LayerSpec(0.35, window, None, torch.zeros(HEADS))
    tables = {arm: Table(table) for arm, table in random_tables(3, 73, arms=(1, 4)).items()}
    whole, record = run_fast(x, spec, tables)
    monkeypatch.setattr(attention, "CHUNK_BYTES", {"cpu": limit, "default": limit})
    pieces, parts = run_fast(x, spec, tables)
    assert_close(pieces, whole, atol=1e-6, rtol=1e-6)
    assert_close(parts.retained, record.retained, atol=1e-6, rtol=1e-6)
    assert torch.equal(parts.reached, record.reached)


@pytest.mark.parametrize("limit", [1, 100, 10_000])
@pytest.mark.parametrize(("batch", "t"), [(1, 1), (7, 3), (2, 100), (5, 16)])
def test_chunks_cover_every_row_of_every_arm_once(batch, t, limit):
    seen = torch.zeros(batch, t)
    for b, rows in twopart.chunks(batch, t, 64, limit):
        seen[b, rows] += 1
    assert bool((seen == 1).all())


def exact_row(offset, gap, n=6):
    """One query whose logits are whole 64ths: key 2 lies ``gap`` nats above the others, all shifted by ``offset``."""
    s = torch.zeros(n)
    s[2] = gap
    key = torch.zeros(1, KV_HEADS, n, D)
    key[..., 0], key[..., 1] = offset, s
    query = torch.zeros(1, HEADS, 1, D)
    query[..., :2] = 1
    value = torch.randn(1, KV_HEADS, n, DV, generator=torch.Generator().manual_seed(0))
    return Operands(query, key, value, None), s.double()


@pytest.mark.parametrize("offset", [0.0, 2e5, -2e5])
@pytest.mark.parametrize("gap", [0.0, 13.8125, 27.625, 60.0, -20.0])
@pytest.mark.parametrize("with_sink", [False, True])
def test_retained_mass_keeps_its_digits_beside_huge_logits(offset, gap, with_sink):
    x, s = exact_row(offset, gap)
    sink = torch.full((HEADS,), offset - 1.0) if with_sink else None
    table = torch.zeros(HEADS, 6, 6)
    table[:, 5, 2] = -torch.inf
    z, record = run_fast(x, LayerSpec(1.0, sink=sink), {0: Table(table)})
    weights = s.exp()
    rest = math.exp(-1.0) if with_sink else 0.0
    kept = weights.sum() - weights[2] if gap < 0 else torch.cat([weights[:2], weights[3:]]).sum()
    expected = (kept + rest) / (kept + rest + weights[2])
    assert_close(record.retained.double(), expected.expand_as(record.retained), rtol=1e-5, atol=0)
    assert float(record.masked_weight) == 0
    alive = torch.cat([x.value[0, :, :2], x.value[0, :, 3:]], 1).double().sum(1) / (kept + rest)
    assert_close(z[0, 0].double(), alive.repeat_interleave(3, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.5, 5.0, 80.0])
def test_retained_mass_of_a_finite_bias(beta):
    x, s = exact_row(0.0, 4.0)
    table = torch.zeros(HEADS, 6, 6)
    table[:, 5, 2] = -beta
    _, record = run_fast(x, LayerSpec(1.0), {0: Table(table)})
    lost = -math.expm1(-beta) * math.exp(4.0) / float(s.exp().sum())
    assert_close(1 - record.retained.double(), torch.full_like(record.retained, lost).double(), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("p", [0, 7])
def test_a_row_without_keys_is_zero_and_sees_no_later_token(p):
    x = operands(seed=5, t=5, m=5, p=p)
    n, row = p + 5, p + 2
    table = torch.zeros(HEADS, n, n)
    table[:, row] = -torch.inf
    spec, tables = LayerSpec(0.35), {1: Table(table)}
    z, record = run_fast(x, spec, tables)
    assert bool((z[1, 2] == 0).all()) and bool((record.retained[1, :, 2] == 0).all())
    assert not z.isnan().any() and not record.retained.isnan().any()
    later_key, later_value = x.key.clone(), x.value.clone()
    later_key[:, :, 3:], later_value[:, :, 3:] = 50.0, -1e4
    changed, _ = run_fast(Operands(x.query, later_key, later_value, x.prefix), spec, tables)
    assert torch.equal(changed[:, :3], z[:, :3])


def test_a_learned_sink_takes_what_a_full_row_mask_leaves():
    x, sink = operands(seed=6), torch.linspace(-1, 1, HEADS)
    table = torch.full((HEADS, 13, 13), -torch.inf)
    z, record = run_fast(x, LayerSpec(0.35, sink=sink), {1: Table(table)})
    assert bool((z[1] == 0).all())
    for h, row in ((0, 0), (5, 3)):
        everything = slow_row(x, LayerSpec(0.35, sink=sink), table, 1, h, row)[1]
        assert 0 < everything < 1
        assert_close(float(record.retained[1, h, row]), everything, rtol=1e-5, atol=0)


def test_a_bias_of_zero_changes_no_bit():
    x, spec = operands(seed=7), LayerSpec(0.35, None, 2.0)
    tables = random_tables(7, 13)
    alone, _ = run_fast(x, spec, {})
    together, record = run_fast(x, spec, {arm: Table(table) for arm, table in tables.items()})
    assert torch.equal(together[0], alone[0])
    assert bool((record.retained[0] == 1).all()) and int(record.reached[0]) == 0


def test_other_heads_keep_every_bit():
    x = operands(seed=8, batch=2)
    x = Operands(*(part[:1].expand_as(part) for part in (x.query, x.key, x.value)), x.prefix)
    table = torch.zeros(HEADS, 13, 13)
    table[4, :, 2:9] = -torch.inf
    z, record = run_fast(x, LayerSpec(0.35), {1: Table(table)})
    others = [0, 1, 2, 3, 5]
    assert torch.equal(z[0][:, others], z[1][:, others]) and not torch.equal(z[0], z[1])
    assert bool((record.retained[1, others] == 1).all()) and bool((record.retained[1, 4] < 1).all())


@pytest.mark.parametrize("p", [0, 7])
def test_a_query_head_reads_the_kv_head_of_its_group(p):
    x = operands(seed=9, p=p, t=2, m=3)
    z, _ = run_fast(x, LayerSpec(0.35, window=1), {0: Table(torch.zeros(HEADS, p + 3, p + 3))})
    for h in range(HEADS):
        assert_close(z[:, :, h], x.value[:, h // 3, 1:], rtol=1e-6, atol=1e-6)


def test_low_precision_operands_are_summed_in_fp32():
    x = operands(seed=10)
    half = Operands(x.query.bfloat16(), x.key.bfloat16(), x.value.bfloat16(), tuple(y.bfloat16() for y in x.prefix))
    full = Operands(half.query.float(), half.key.float(), half.value.float(), tuple(y.float() for y in half.prefix))
    tables = {1: Table(random_tables(10, 13)[1])}
    low, record = run_fast(half, LayerSpec(0.35), tables)
    high, reference = run_fast(full, LayerSpec(0.35), tables)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, high.bfloat16())
    assert torch.equal(record.retained, reference.retained)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_layer_logits_equal_loops(window, softcap):
    x = operands(seed=11, p=9)
    query, key = x.query[0], x.prefix[0]
    positions = torch.tensor([0, 3, 7, 8])
    spec = LayerSpec(0.35, window, softcap)
    logits = twopart.layer_logits(query, key, spec, positions)
    for h in range(HEADS):
        for i, q in enumerate(positions.tolist()):
            for k in range(9):
                s = 0.35 * float(query[h, i].double() @ key[h // 3, k].double())
                s = s if softcap is None else softcap * math.tanh(s / softcap)
                seen = k <= q and (window is None or q - k < window)
                assert float(logits[h, i, k]) == pytest.approx(s, abs=1e-5) if seen else logits[h, i, k] == -torch.inf


def test_visibility_counts_the_query_in_its_window():
    seen = twopart.visible(torch.tensor([7]), torch.arange(10), 4)[0]
    assert seen.nonzero()[:, 0].tolist() == [4, 5, 6, 7]
    assert twopart.visible(torch.tensor([2]), torch.arange(4), None)[0].tolist() == [True, True, True, False]


def test_plain_means_that_an_ordinary_causal_softmax_is_exact():
    assert LayerSpec(1.0).plain
    for spec in (LayerSpec(1.0, window=4), LayerSpec(1.0, softcap=2.0), LayerSpec(1.0, sink=torch.zeros(2))):
        assert not spec.plain

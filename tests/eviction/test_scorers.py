"""Every scorer against fp64 loops written from its formula, on attention of every kind."""

import math
from dataclasses import replace

import eviction_layers as slow
import pytest
import torch
from torch.testing import assert_close

from kvprobe.errors import EvictionError
from kvprobe.eviction.scorers import (
    H2O,
    H2O256,
    TOVA,
    DefensiveKV,
    ExpectedAttention,
    Knorm,
    OBCache,
    Oracle,
    Random,
    SnapKV,
    Streaming,
)


def test_layers_are_what_they_say():
    """The ragged builder pads on the left, and the loops are a softmax of the layer's own logits."""
    lay = slow.ragged(slow.kind("gqa"), [6, 1])
    assert lay.positions[0].tolist() == [-1] * 5 + list(range(6, 23)) and lay.n == 22
    assert_close(slow.rows(lay, 4).sum(-1), torch.ones(4, 4, dtype=torch.float64))
    whole = slow.kind("gqa")
    scores = whole.queries[3, -1].double() @ whole.keys[1].double().T * whole.spec.scale
    assert_close(slow.rows(whole, 1)[3, 0], scores.softmax(-1))


# H2O


def test_h2o_sums_columns_over_all_queries(lay):
    slow.close(lay, H2O().score(lay), slow.rows(lay, lay.length).sum(1))


def test_h2o_divided_by_the_queries_that_saw_an_entry(lay):
    sums = slow.rows(lay, lay.length).sum(1)
    truth = torch.zeros_like(sums)
    for head in range(lay.n_heads):
        for entry, position in enumerate(lay.positions[head // lay.group].tolist()):
            saw = [at for at in range(lay.length) if 0 <= at - position < (lay.spec.window or lay.length)]
            truth[head, entry] = sums[head, entry] / max(len(saw), 1)
    slow.close(lay, H2O(norm="queries_seen").score(lay), truth)


def test_h2o_256_looks_at_the_last_queries(lay):
    slow.close(lay, H2O256(window=5).score(lay), slow.rows(lay, 5).sum(1))
    assert H2O256().window == 256 and H2O256().rows(1000) == 256
    slow.close(lay, H2O256().score(lay), H2O().score(lay))  # fewer than 256 tokens: all of them


@pytest.mark.parametrize("scorer", [H2O(), H2O256(window=5)])
@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
def test_h2o_keeps_the_recent_half(scorer, granularity):
    lay = slow.kind("gqa", granularity=granularity)
    budgets = torch.tensor([5, 8] if granularity == "kv_head" else [5, 8, 1, 23])
    for row, b in zip(scorer.protected(lay, budgets), budgets.tolist(), strict=True):
        recent = b - b // 2
        assert row.tolist() == [False] * (23 - recent) + [True] * recent


# TOVA, StreamingLLM, Knorm


def test_tova_is_one_row_for_all_heads(whole):
    truth = slow.rows(whole, 1)[:, 0].mean(0).expand(whole.n_kv_heads, -1)
    slow.close(whole, TOVA().score(whole), truth)
    last = TOVA().protected(whole, torch.full((whole.n_kv_heads,), 9))
    assert last.sum(-1).tolist() == [1] * whole.n_kv_heads and bool(last[:, -1].all())


def test_tova_after_evictions():
    full = slow.kind("gqa")
    same = slow.ragged(full, [5, 5])  # the same entries on every head
    slow.close(same, TOVA().score(same), slow.rows(same, 1)[:, 0].mean(0).expand(2, -1))
    with pytest.raises(EvictionError, match="allowed: uniform budgets with topk"):
        TOVA().score(slow.ragged(full, [5, 6]))


def test_streaming_keeps_sinks_then_the_most_recent(lay):
    scores = Streaming().score(lay)
    assert slow.there(lay, scores).tolist() == lay.positions[lay.alive].tolist()
    kept = Streaming(sinks=3).protected(lay, torch.full((lay.n_kv_heads,), 9))
    truth = [[0 <= position < 3 for position in row] for row in lay.positions.tolist()]
    assert kept.tolist() == truth
    assert not Streaming(sinks=0).protected(lay, torch.full((lay.n_kv_heads,), 9)).any()


def test_streaming_orders_long_texts():
    """Recency has no ties in fp32 at lengths that models reach."""
    lay = replace(slow.kind("gqa"), positions=torch.arange(23).expand(2, -1) + (1 << 23))
    assert bool((Streaming().score(lay).diff(dim=-1) > 0).all())


def test_knorm(lay):
    slow.close(lay, Knorm().score(lay), -lay.keys.double().square().sum(-1).sqrt())


def test_knorm_in_bf16_takes_the_norm_in_fp32():
    lay = slow.in_dtype(slow.kind("gqa"), torch.bfloat16)
    assert Knorm().score(lay).dtype == torch.float32
    slow.close(lay, Knorm().score(lay), -lay.keys.double().norm(dim=-1), rtol=1e-6)


# Oracle, random


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_oracle(lay, reduce):
    future = torch.randn(lay.n_heads, 5, 6, generator=torch.Generator().manual_seed(9)) * 1.3
    lay = replace(lay, future=future, queries=lay.queries[:, :0])
    weights = torch.stack(
        [torch.stack([slow.row(lay, h, future[h, j], lay.length + j) for j in range(5)]) for h in range(lay.n_heads)]
    )
    slow.close(lay, Oracle(reduce=reduce).score(lay), weights.mean(1) if reduce == "mean" else weights.amax(1))


def test_oracle_needs_a_future():
    for future in (None, torch.zeros(4, 0, 6)):
        with pytest.raises(EvictionError, match="allowed: future=… with one or more"):
            Oracle().score(slow.kind("gqa", future=future))
    assert Oracle.needs_future and Oracle().rows(100) == 0


def test_oracle_rows_are_the_exact_rows_renormalised():
    """Beside the later keys the exact row is the oracle's times the mass that the context gets."""
    full = slow.kind("gqa", n=12)
    lay = replace(full, keys=full.keys[:, :9], values=full.values[:, :9], positions=full.positions[:, :9], length=9)
    exact = slow.rows(full, 1)[:, 0, :9]
    oracle = Oracle().score(replace(lay, future=full.queries[:, -1:])).double()
    assert float(exact.sum(-1).max()) < 0.99  # the later keys do take a share
    assert_close(oracle, exact / exact.sum(-1, keepdim=True), rtol=1e-5, atol=1e-7)


def test_random_by_seed_layer_and_set():
    lay = slow.kind("gqa", n=400)
    base = Random().score(lay)
    assert torch.equal(base, Random().score(replace(slow.kind("gqa", n=400, seed=8), seed=0)))  # not by the content
    others = [replace(lay, seed=1), replace(lay, index=4)]
    for other in [Random().score(each) for each in others] + [base.flip(0)]:
        assert bool((other != base).float().mean() > 0.99)
        assert abs(float(torch.corrcoef(torch.stack([other.flatten(), base.flatten()]))[0, 1])) < 0.2
    assert 0.45 < float(base.mean()) < 0.55 and float(base.min()) >= 0 and float(base.max()) < 1
    assert Random().score(replace(lay, granularity="query_head")).shape == (4, 400)


def test_random_scores_stay_with_their_positions():
    """Whatever was evicted before, and however many tokens come later, an entry keeps its draw."""
    full = slow.kind("gqa", n=40)
    base, gone = Random().score(full), slow.ragged(full, [6, 1])
    for head, row in enumerate(Random().score(gone)):
        for value, position in zip(row.tolist(), gone.positions[head].tolist(), strict=True):
            assert position < 0 or value == float(base[head, position])
    assert torch.equal(Random().score(slow.kind("gqa", n=700))[:, :40], base)


# Settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: H2O(norm="mean"), "norm='mean'; allowed: none, queries_seen"),
        (lambda: H2O256(window=0), "window=0; allowed: a whole number ≥ 1"),
        (lambda: H2O256(window=True), "window=True; allowed: a whole number ≥ 1"),
        (lambda: Streaming(sinks=-1), "sinks=-1; allowed: a whole number ≥ 0"),
        (lambda: ExpectedAttention(n_future=0), "n_future=0; allowed: a whole number ≥ 1"),
        (lambda: ExpectedAttention(sinks=1.5), "sinks=1.5; allowed: a whole number ≥ 0"),
        (lambda: ExpectedAttention(epsilon=-1e-4), "epsilon=-0.0001; allowed: a finite number ≥ 0"),
        (lambda: ExpectedAttention(epsilon=math.nan), "epsilon=nan; allowed: a finite number ≥ 0"),
        (lambda: ExpectedAttention(epsilon=math.inf), "epsilon=inf; allowed: a finite number ≥ 0"),
        (lambda: ExpectedAttention(covariance=1), "covariance=1; allowed: True, False"),
        (lambda: ExpectedAttention(vnorm="yes"), "vnorm='yes'; allowed: True, False"),
        (lambda: DefensiveKV(window=0), "window=0; allowed: a whole number ≥ 1"),
        (lambda: DefensiveKV(pool="mean"), "pool='mean'; allowed: avg, max, none"),
        (lambda: DefensiveKV(kernel=4), "kernel=4; allowed: an odd whole number ≥ 1"),
        (lambda: DefensiveKV(stage1=1.0), "stage1=1.0; allowed: a finite number from 0 to 0.999"),
        (lambda: DefensiveKV(mass="old"), "mass='old'; allowed: fixed, released"),
        (lambda: DefensiveKV(p=3), "p=3; allowed: 1, 2"),
        (lambda: DefensiveKV(p=True), "p=True; allowed: 1, 2"),
        (lambda: OBCache(window="32"), "window='32'; allowed: a whole number ≥ 1"),
        (lambda: Oracle(reduce="sum"), "reduce='sum'; allowed: mean, max"),
    ],
)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(EvictionError) as caught:
        make()
    assert str(caught.value) == message


def test_defaults_are_the_published_ones():
    e, d = ExpectedAttention(), DefensiveKV()
    assert (SnapKV().window, Streaming().sinks) == (32, 4)
    assert (e.n_future, e.sinks, e.epsilon, e.covariance, e.vnorm) == (512, 4, 0, True, True)
    assert (d.window, d.pool, d.kernel, d.stage1, d.mass, d.p) == (32, "avg", 5, 0.9, "fixed", 1)
    assert DefensiveKV.default_budget == "layer_global" and DefensiveKV.aligned and d.value_aware
    assert OBCache().window == 32 and OBCache().value_aware

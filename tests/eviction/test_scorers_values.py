"""Scorers that look at values or at queries to come, against fp64 loops written from their formulas."""

import math
from dataclasses import replace

import eviction_layers as slow
import pytest
import torch
from torch.testing import assert_close

from kvprobe.errors import EvictionError
from kvprobe.eviction.scorers import DefensiveKV, ExpectedAttention, OBCache

# ExpectedAttention


def expected(lay, scorer):
    """Mean and covariance by sums, rotation by matrices, softmax by loops."""
    turns, out = slow.Turns(lay.queries.shape[-1]), torch.zeros(lay.n_heads, lay.n, dtype=torch.float64)
    ahead = [turns.matrix(p) for p in range(lay.length, lay.length + scorer.n_future)]
    mean_turn = sum(ahead) / len(ahead)
    for head in range(lay.n_heads):
        before = [turns.matrix(p).T @ lay.queries[head, p].double() for p in range(scorer.sinks, lay.length)]
        mu = sum(before) / len(before)
        sigma = sum(torch.outer(q - mu, q - mu) for q in before) / len(before)
        mu, sigma = mean_turn @ mu, mean_turn @ sigma @ mean_turn.T
        logits = {}
        for entry, position in enumerate(lay.positions[head // lay.group].tolist()):
            key = lay.keys[head // lay.group, entry].double()
            if position >= scorer.sinks:
                square = float(key @ sigma @ key) / 2 if scorer.covariance else 0.0
                logits[entry] = lay.spec.scale * float(key @ mu) + lay.spec.scale**2 * square
        total = math.fsum(math.exp(x) for x in logits.values())
        for entry in range(lay.n):
            weight = math.exp(logits[entry]) / total if entry in logits else 0.0
            norm = float(lay.values[head // lay.group, entry].double().norm())
            out[head, entry] = (weight + scorer.epsilon) * norm if scorer.vnorm else weight
    return out


@pytest.mark.parametrize(
    "options", [{}, {"epsilon": 1e-2}, {"covariance": False}, {"vnorm": False}, {"sinks": 0, "n_future": 1}], ids=str
)
def test_expected_attention(lay, options):
    scorer = ExpectedAttention(**{"n_future": 17} | options)
    lay = replace(lay, rotary=slow.Turns(6))
    asked = replace(lay, queries=lay.queries[:, scorer.sinks :])  # as many rows as it asks for
    slow.close(lay, scorer.score(asked), expected(lay, scorer), rtol=1e-4)


def test_expected_attention_asks_for_the_queries_after_the_sinks():
    assert ExpectedAttention().rows(100) == 96 and ExpectedAttention(sinks=0).rows(100) == 100
    assert ExpectedAttention().rows(3) == 0
    assert ExpectedAttention().value_aware and not ExpectedAttention(vnorm=False).value_aware
    kept = ExpectedAttention().protected(slow.kind("gqa"), torch.tensor([9, 9]))
    assert kept.tolist() == [[True] * 4 + [False] * 19] * 2


def test_expected_attention_says_what_it_misses():
    with pytest.raises(EvictionError, match="a layer without its rotation; allowed: more than sinks=4"):
        ExpectedAttention().score(slow.kind("gqa"))
    with pytest.raises(EvictionError, match="4 tokens; allowed: more than sinks=4"):
        ExpectedAttention().score(slow.kind("gqa", n=4, rotary=slow.Turns(6)))


def test_expected_attention_is_the_log_of_a_mean_exponential():
    """Gaussian queries that all turn by nothing: the logits are ln E[exp(s q·k)], here by sampling."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(1, 200_000, 2, generator=generator, dtype=torch.float64) @ torch.tensor(
        [[0.9, 0.3], [0.0, 0.5]], dtype=torch.float64
    ) + torch.tensor([0.4, -0.7], dtype=torch.float64)
    lay = slow.layer(n=6, n_heads=1, n_kv_heads=1, d=2, queries=6, seed=2)
    means = (queries[0] @ lay.keys[0].double().T * lay.spec.scale).exp().mean(0)

    class Still:
        unrotate = staticmethod(lambda x, at: x)
        mean_matrix = staticmethod(lambda at: torch.eye(2))

    lay = replace(lay, queries=queries.float(), length=200_000, rotary=Still())
    got = ExpectedAttention(sinks=0, vnorm=False).score(lay)[0].double()
    assert_close(got, means / means.sum(), rtol=0.02, atol=0)


# DefensiveKV


def pool_loop(row, kind, kernel):
    """avg: zero padded, always divided by the kernel; max: over what is there."""
    half, out = kernel // 2, []
    for i in range(len(row)):
        near = [row[j] for j in range(max(0, i - half), min(len(row), i + half + 1))]
        out.append(row[i] if kind == "none" else max(near) if kind == "max" else sum(near) / kernel)
    return out


def defensive(lay, scorer):
    weights, past = slow.rows(lay, scorer.window), lay.n - scorer.window
    out = torch.zeros(lay.n_kv_heads, lay.n, dtype=torch.float64)
    norms = torch.zeros(lay.n_kv_heads, past, dtype=torch.float64)
    for k in range(lay.n_kv_heads):
        group = range(k * lay.group, (k + 1) * lay.group)
        for i in range(past):
            outs = [lay.values[k, i].double() @ lay.w_o[h].double() for h in group]
            norms[k, i] = sum(float(o.abs().sum() if scorer.p == 1 else o.norm()) for o in outs) / lay.group
        risk = [0.0] * past
        for h in group:
            for j in range(scorer.window):
                row = weights[h, j, :past].tolist()
                smooth = pool_loop(row, scorer.pool, scorer.kernel)
                scale = sum(row) / sum(smooth) if sum(smooth) else 0.0
                risk = [max(old, scale * new) for old, new in zip(risk, smooth, strict=True)]
        floor = sum(risk) / past
        out[k, :past] = torch.tensor([max(each, floor) for each in risk])
    out[:, :past] *= norms / norms.sum(0)
    return out


@pytest.mark.parametrize(
    "options", [{}, {"pool": "max", "kernel": 3}, {"pool": "none"}, {"p": 2}, {"window": 1}], ids=str
)
def test_defensivekv(whole, options):
    scorer = DefensiveKV(**{"window": 4} | options)
    slow.close(whole, scorer.score(whole), defensive(whole, scorer))


def stage1(lay, scorer, budgets):
    """The adaptive first stage in the order of the formula: renormalise, sort, add up until the threshold."""
    weights, past = slow.rows(lay, scorer.window), lay.n - scorer.window
    means = weights.mean(1).unflatten(0, (lay.n_kv_heads, lay.group)).mean(1)  # [K, n]
    mass = means.sum(-1, keepdim=True)
    before = (means[:, max(past - scorer.window, 0) : past].sum(-1)).mean()
    kept = torch.zeros(lay.n_kv_heads, lay.n, dtype=torch.bool)
    kept[:, past:] = True
    for k in range(lay.n_kv_heads):
        shares = (means[k] / mass[k]).tolist()
        window = sum(shares[past:])
        threshold = (scorer.stage1 - window) / (1 - window) if scorer.mass == "fixed" else scorer.stage1 - float(before)
        total, places = 0.0, max(int(budgets[k]) - scorer.window, 0)
        for entry in sorted(range(past), key=lambda i: (-shares[i], i))[:places]:
            total += shares[entry] / sum(shares[:past])
            if total >= threshold:
                break
            kept[k, entry] = True
    return kept


@pytest.mark.parametrize("mass", ["fixed", "released"])
@pytest.mark.parametrize("limit", [0.0, 0.6, 0.9, 0.98])
@pytest.mark.parametrize("budget", [2, 4, 9, 23])
def test_defensivekv_first_stage(whole, mass, limit, budget):
    scorer = DefensiveKV(window=4, mass=mass, stage1=limit)
    budgets = torch.full((whole.n_kv_heads,), budget) + torch.arange(whole.n_kv_heads)
    kept = scorer.protected(whole, budgets)
    assert kept.tolist() == stage1(whole, scorer, budgets).tolist()
    assert bool((kept.sum(-1) <= budgets.clamp(min=4)).all())


def test_the_two_readings_of_the_first_stage_differ():
    lay = slow.kind("gqa", n=60)
    budgets = torch.full((2,), 60)
    fixed, released = (DefensiveKV(window=4, mass=each).protected(lay, budgets) for each in ("fixed", "released"))
    assert fixed.sum() != released.sum()


def test_defensivekv_ties_go_to_the_earlier_position():
    """One query that sees 16 keys alike: every weight is 1/16 exactly."""
    lay = slow.kind("gqa", n=16)
    lay = replace(lay, keys=torch.zeros_like(lay.keys))
    kept = DefensiveKV(window=1).protected(lay, torch.tensor([9, 6]))
    assert kept.tolist() == [[True] * 8 + [False] * 7 + [True], [True] * 5 + [False] * 10 + [True]]


def test_defensivekv_needs_a_group():
    grouped = slow.kind("gqa", granularity="query_head")
    for call in (DefensiveKV(window=4).score, lambda lay: DefensiveKV(window=4).protected(lay, torch.full((4,), 9))):
        with pytest.raises(EvictionError, match="allowed: granularity='kv_head'"):
            call(grouped)
    single = slow.kind("mha")
    scorer = DefensiveKV(window=4)
    assert_close(scorer.score(replace(single, granularity="query_head")), scorer.score(single))


# OBCache


def obcache(lay, window):
    out = torch.zeros(lay.n_heads, lay.n, dtype=torch.float64)
    weights = slow.rows(lay, window)
    for head in range(lay.n_heads):
        values = lay.values[head // lay.group].double()
        for j in range(window):
            row = weights[head, j]
            output = sum(row[i] * values[i] for i in range(lay.n))
            for p in range(lay.n):
                z = slow.logit(lay, head, lay.queries[head, j - window], p)
                out[head, p] += (row[p] * values[p] + row[p] * z * (values[p] - output)).square().sum()
    return out


def test_obcache(lay):
    slow.close(lay, OBCache(window=4).score(lay), obcache(lay, 4))
    kept = OBCache(window=4).protected(lay, torch.full((lay.n_kv_heads,), 9))
    assert bool(kept[:, -4:].all()) and kept.sum() == 4 * lay.n_kv_heads


def test_obcache_where_its_terms_cancel():
    """Values far from 0 and close together, large logits: v + z (v − o) is small beside each of its terms."""
    lay = slow.kind("gqa", seed=5)
    lay = replace(lay, values=lay.values * 1e-3 + 40.0, queries=lay.queries * 12)
    slow.close(lay, OBCache(window=4).score(lay), obcache(lay, 4), rtol=1e-4)
    assert bool((OBCache(window=4).score(lay) >= 0).all())
    exact = obcache(lay, 4)
    assert float(exact[exact > 0].min()) < 1e-12 * float(exact.max())  # the test reaches far down

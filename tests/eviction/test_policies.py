"""Laws that every policy obeys, on tiny models of every family and on layers made by hand."""

from dataclasses import replace

import catalogue
import eviction_layers
import pytest
import tiny as families
import torch
from policies import all_policies, at_query_heads, future_of, protected_of
from torch.testing import assert_close

from kvprobe import Prompt, eviction, intervene
from kvprobe.errors import CapabilityError, EvictionError
from kvprobe.eviction import KeepMask, TopK, TwoStage, measure

POLICIES = all_policies()
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
IDS = catalogue.ids()
OTHER = catalogue.ids()[::-1]
C = 22
PROMPT = Prompt.from_ids(IDS)


def able(family, policy):
    """Whether this family's cache can be scored by this policy at all."""
    return not (policy.scorer.needs_rotary and family == "gpt2")


def chosen(model, policy, ids=IDS[:C], cache_ratio="0.5"):
    seen = measure(model, ids, [policy], future=future_of(policy))
    return seen.scored(policy), policy.choose(seen.scored(policy), cache_ratio)


@every_policy
@pytest.mark.parametrize("family", families.FAMILIES)
def test_budgets_are_exact_and_protected_entries_stay(family, policy, tiny):
    model = tiny(family)
    if not able(family, policy):
        with pytest.raises(CapabilityError, match="rotary_emb found: none"):
            policy.select(model, IDS[:C], 0.5)
        return
    if policy.budget.name == "duo" and model.geometry.n_kv_heads != 2:
        with pytest.raises(EvictionError, match="gates of shape"):
            policy.select(model, IDS[:C], 0.5)
        return
    geometry = model.geometry
    for ratio, base in (("0.5", 11), ("0.7", 15)):
        scored, choice = chosen(model, policy, cache_ratio=ratio)
        assert choice.keep.shape == (geometry.n_layers, geometry.n_kv_heads, C)
        assert torch.equal(choice.keep.sum(-1), choice.budgets.cpu())
        if policy.budget.name != "duo":
            assert int(choice.budgets.sum()) == base * geometry.n_layers * geometry.n_kv_heads
        if policy.budget.name in ("adakv", "uniform"):
            assert (choice.budgets.sum(-1) == base * geometry.n_kv_heads).all()
        assert (choice.keep | ~protected_of(policy, scored, choice)).all()


@every_policy
def test_keep_all_is_no_eviction_bit_for_bit(policy, tiny):
    model = tiny("llama")
    keep = policy.select(model, IDS[:C], 1, future=future_of(policy))
    assert keep.all()
    clean, kept = intervene(model, PROMPT, [(), KeepMask(keep)], suffix=len(IDS) - C, continuation=[5, 6])
    assert torch.equal(clean.logits, kept.logits)


@every_policy
def test_documents_in_either_order_and_together_give_the_same_sets(policy, tiny):
    model = tiny("llama")
    first = [policy.select(model, ids[:C], "0.4", future=future_of(policy)) for ids in (IDS, OTHER)]
    second = [policy.select(model, ids[:C], "0.4", future=future_of(policy)) for ids in (OTHER, IDS)]
    assert torch.equal(first[0], second[1]) and torch.equal(first[1], second[0])


@pytest.fixture(scope="module")
def together(tiny):
    return measure(tiny("llama"), IDS[:C], list(POLICIES.values()), future=[7, 8, 9])


@every_policy
def test_policies_measured_together_choose_as_alone(policy, tiny, together):
    model = tiny("llama")
    alone = policy.select(model, IDS[:C], "0.4", future=future_of(policy) and [7, 8, 9])
    assert torch.equal(policy.choose(together.scored(policy), "0.4").keep, alone)


@every_policy
def test_left_pads_change_nothing(policy, tiny):
    model = tiny("llama")
    padded = Prompt.from_ids([0, 0, *IDS[:C]], attention_mask=[0, 0, *[1] * C])
    alone = policy.select(model, IDS[:C], "0.4", future=future_of(policy))
    assert torch.equal(policy.select(model, padded, "0.4", future=future_of(policy)), alone)


def hand_made(policy, **changes):
    """Three layers made by hand, as the policy's scorer sees them."""
    rows = policy.scorer.rows(C)
    if policy.scorer.needs_future:
        changes["future"] = torch.randn(6, 3, 6, generator=torch.Generator().manual_seed(9))
    if policy.scorer.needs_rotary:
        changes["rotary"] = eviction_layers.Turns(6)
    layers = [
        eviction_layers.layer(n=C, n_heads=6, n_kv_heads=2, queries=max(rows, 1), seed=seed, index=seed, **changes)
        for seed in range(3)
    ]
    return [
        replace(layer, granularity=policy.granularity, queries=layer.queries[:, 1 - bool(rows) :]) for layer in layers
    ]


@every_policy
def test_query_heads_of_a_group_in_any_order(policy):
    layers = hand_made(policy)
    order = [2, 0, 1, 4, 5, 3]
    importance = {}
    if policy.budget.name == "headkv":
        table = torch.tensor(policy.budget.importance)[:, order]
        importance = {"budget": replace(policy.budget, importance=table)}
    other = replace(policy, **importance)
    mine = policy.choose([policy.score(layer) for layer in layers], "0.5").keep
    theirs = other.choose([other.score(eviction_layers.permuted(layer, order)) for layer in layers], "0.5").keep
    assert torch.equal(mine, theirs)


@every_policy
def test_query_head_granularity(policy):
    """One kept set a query head; with one query head a kv head both granularities are one."""
    fine = at_query_heads(policy)
    if fine is None:
        assert policy.budget.name == "duo" or policy.scorer.name == "defensivekv"
        return
    layers = hand_made(fine)
    choice = fine.choose([fine.score(layer) for layer in layers], "0.5")
    assert choice.keep.shape == (3, 6, C) and torch.equal(choice.keep.sum(-1), choice.budgets)
    assert int(choice.budgets.sum()) == 11 * 18
    if policy.budget.name == "headkv":
        return
    alike = []
    for granularity in (policy, fine):
        lone = [
            replace(
                layer,
                keys=layer.keys.repeat_interleave(3, 0),
                values=layer.values.repeat_interleave(3, 0),
                positions=layer.positions.repeat_interleave(3, 0),
                granularity=granularity.granularity,
            )
            for layer in layers
        ]
        alike.append(granularity.choose([granularity.score(layer) for layer in lone], "0.5").keep)
    assert torch.equal(*alike)


staged = pytest.mark.parametrize(
    "policy",
    [p for p in POLICIES.values() if isinstance(p.selector, TwoStage) and not p.selector.needs_heads],
    ids=[n for n, p in POLICIES.items() if isinstance(p.selector, TwoStage) and not p.selector.needs_heads],
)


@staged
def test_alpha_1_and_equal_norms_are_top_k(policy):
    layers = hand_made(policy)
    plain = replace(policy, selector=TopK())
    one = replace(policy, selector=replace(policy.selector, alpha=1.0))
    top = plain.choose([plain.score(layer) for layer in layers], "0.5").keep
    assert torch.equal(one.choose([one.score(layer) for layer in layers], "0.5").keep, top)
    flat = [replace(layer, values=torch.ones_like(layer.values)) for layer in layers]
    same = plain.choose([plain.score(layer) for layer in flat], "0.5").keep
    assert torch.equal(policy.choose([policy.score(layer) for layer in flat], "0.5").keep, same)


@pytest.mark.parametrize("base", ["snapkv", "adakv", "tova"])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_one_vector_added_to_all_values_changes_no_centred_choice(base, p, rounds):
    options = {"window": 4} if base != "tova" else {}
    policy = eviction.policy(base, selector="two_stage", centred=rounds, p=p, **options)
    published = replace(policy, selector=TwoStage(p=p))
    layers = hand_made(policy)
    shift = 5 * torch.randn(2, 1, 6, generator=torch.Generator().manual_seed(3))
    moved = [replace(layer, values=layer.values + shift) for layer in layers]

    def kept(who, which):
        return who.choose([who.score(layer) for layer in which], "0.5").keep

    assert torch.equal(kept(policy, layers), kept(policy, moved))
    assert not torch.equal(kept(published, layers), kept(published, moved))


def slow_terms(layer, policy, keep, stage1, group):
    """The value term of every entry by fp64 loops."""
    scores = policy.scorer.score(layer.at_query_heads()).double()
    rows = policy.scorer.rows(layer.length)
    attention = eviction_layers.rows(layer, rows).mean(1)
    terms = torch.zeros(layer.n_kv_heads, layer.n, dtype=torch.float64)
    epsilon, p = policy.selector.epsilon, policy.selector.p
    for head in range(layer.n_heads):
        kv = head // layer.group
        values, w_o = layer.values[kv].double(), layer.w_o[head].double()
        sink = 1 - attention[head].sum() if layer.spec.sink is not None else 0.0
        if group == "bound":
            sigma = float(attention[head][stage1[kv]].sum() + sink)
            weight = max(0.0, 2 - 1 / sigma)
            centre = torch.zeros(w_o.shape[1], dtype=torch.float64)
        else:
            kept = attention[head] * keep[kv]
            weight, centre = 1.0, (kept / (kept.sum() + sink)) @ values @ w_o
        for entry in range(layer.n):
            distance = torch.linalg.vector_norm(values[entry] @ w_o - centre, ord=p)
            terms[kv, entry] += weight * (scores[head, entry] + epsilon) * distance
    return terms


@pytest.mark.parametrize("kind", [*eviction_layers.KINDS])
@pytest.mark.parametrize("options", [{"group": "bound"}, {"centred": 1}, {"centred": 1, "p": 2}], ids=str)
def test_value_terms_are_the_formulas(kind, options):
    policy = eviction.policy("snapkv+two_stage", window=4, pool="avg", kernel=3, **options)
    layer = eviction_layers.kind(kind, n=C, queries=4)
    scored = policy.score(layer)
    top = replace(policy, selector=TopK())
    start = top.choose([top.score(layer)], "0.6").keep[0]
    order = scored.scores.masked_fill(policy.scorer.protected(layer, torch.full((layer.n_kv_heads,), 13)), torch.inf)
    stage1 = torch.zeros_like(start).scatter_(1, order.argsort(dim=-1, descending=True, stable=True)[:, :6], True)
    terms = slow_terms(layer, policy, start, stage1, options.get("group"))
    rest = terms.masked_fill(stage1, torch.inf)
    expected = torch.zeros_like(start).scatter_(1, rest.argsort(dim=-1, descending=True, stable=True)[:, :13], True)
    assert torch.equal(policy.choose([scored], "0.6").keep[0], expected)


def test_an_exact_share_of_entries():
    assert [eviction.entries(n, r) for n, r in ((100, "0.1"), (100, 0.1), (1500, 0.2), (600, 0.4), (3, 1))] == [
        10,
        10,
        300,
        240,
        3,
    ]
    assert eviction.entries(600, "1/3") == 200 and eviction.entries(10**9, "1e-05") == 10**4
    for wrong in (0, -0.1, 1.01, "half", None, float("nan"), float("inf"), True, "1/0", "1e-999999999", "1e999999999"):
        with pytest.raises(EvictionError, match="allowed: a share to keep, 0 < ratio ≤ 1"):
            eviction.entries(10, wrong)


def test_scores_of_two_stage_are_not_moved_by_measuring_norms_twice(tiny):
    scored, _ = chosen(tiny("llama"), eviction.policy("snapkv+two_stage", window=4))
    norms = scored[0].norms(1)
    assert scored[0].norms(1) is norms
    by_hand = torch.stack(
        [
            torch.stack([(scored[0].layer.values[h // 3] @ scored[0].layer.w_o[h]).abs().sum(-1) for h in group]).mean(
                0
            )
            for group in ((0, 1, 2), (3, 4, 5))
        ]
    )
    assert_close(norms, by_hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["gqa", "sink", "softcap", "window", "all"])
def test_pooling_comes_before_the_group_mean(kind):
    """On every kind of attention: max-pooling and the mean over a group do not commute."""
    layer = eviction_layers.kind(kind, n=C, queries=4)
    scorer = eviction.SCORERS["snapkv"](4, "max", 5)
    means = eviction_layers.rows(layer, 4).mean(1)[:, : C - 4]
    wide = torch.nn.functional.pad(means, (2, 2), value=-1).unfold(-1, 5, 1).amax(-1)
    expected = wide.view(layer.n_kv_heads, layer.group, -1).mean(1)
    assert_close(scorer.score(layer)[:, : C - 4].double(), expected, rtol=1e-5, atol=1e-7)
    other = torch.nn.functional.pad(means.view(layer.n_kv_heads, layer.group, -1).mean(1), (2, 2), value=-1)
    assert not torch.allclose(other.unfold(-1, 5, 1).amax(-1), expected, rtol=1e-3)


@pytest.mark.parametrize("options", [{"group": "bound"}, {"centred": 1}, {}], ids=str)
def test_the_safeguard_is_a_first_stage_whatever_the_value_term(options):
    """AdaKV guarantees ⌊0.2 b⌋ of a head's own top: they are stage 1 even where ⌊α B_h⌋ is less."""
    selector = TwoStage(alpha=0.0, **options)
    policy = eviction.policy("snapkv", window=1, pool="none", budget="adakv", safeguard=0.8, selector=selector)
    layer = eviction_layers.layer(n=C, n_heads=4, n_kv_heads=2, queries=1)
    low = policy.score(layer).scores < policy.score(layer).scores.median(-1, keepdim=True).values
    layer = replace(layer, values=layer.values * torch.where(low, 1e4, 1e-2)[..., None])  # all value where none looks
    scored = policy.score(layer)
    budgets, protected = torch.tensor([10, 12]), policy.scorer.protected(layer, torch.tensor([10, 12]))
    keep = selector.select(scored, budgets, protected, at_least=8)
    first = scored.scores.masked_fill(protected, torch.inf).argsort(dim=-1, descending=True, stable=True)[:, :8]
    assert keep.gather(1, first).all() and keep.sum(-1).tolist() == [10, 12]
    assert not selector.select(scored, budgets, protected, at_least=0).gather(1, first).all()


def test_wrong_arguments_are_one_line(tiny):
    policy = eviction.policy("streaming")
    for wrong in (policy, "streaming", None):
        with pytest.raises(EvictionError, match="allowed: a list of policies"):
            measure(tiny("llama"), IDS, wrong)
    seen = measure(tiny("llama"), IDS, [policy])
    with pytest.raises(EvictionError, match="'streaming' is no policy"):
        seen.scored("streaming")
    with pytest.raises(EvictionError, match="no layer was scored"):
        policy.choose([], 0.5)
    for wrong in (0, len(IDS) + 1):
        with pytest.raises(EvictionError, match=f"base={wrong} entries of {len(IDS)}; allowed: 1 … {len(IDS)}"):
            policy.choose(seen.scored(policy), None, wrong)
    with pytest.raises(EvictionError, match="None is not a loaded model"):
        policy.select(None, IDS, 0.5)

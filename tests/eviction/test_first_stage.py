"""N′ of Algorithm 1 for every policy: loops over (−score, position), and how it lies within what is kept."""

from dataclasses import replace
from fractions import Fraction

import catalogue
import pytest
import torch
from policies import all_policies, at_query_heads, future_of, protected_of

from kvprobe import eviction
from kvprobe.errors import EvictionError
from kvprobe.eviction.policies import entries
from kvprobe.eviction.selectors import TwoStage, stage1_places

every_policy = pytest.mark.parametrize("policy", all_policies().values(), ids=all_policies())
every_ratio = pytest.mark.parametrize("ratio", ["0.4", "0.7", "1"])
N = 24


def scored_of(tiny, policy, family="llama", n=N):
    return eviction.measure(tiny(family), catalogue.ids(1, n), [policy], future=future_of(policy)).scored(policy)


def slow_first(scored, policy, choice, protected, places):
    """[L, J, n] by loops: the protected, then the best scores in the order (−score, position), up to ``places``."""
    out = torch.zeros_like(choice.keep)
    for layer, each in enumerate(scored):
        for head in range(choice.keep.shape[1]):
            kept = [i for i in range(N) if protected[layer, head, i]]
            rest = sorted((-float(each.scores[head, i]), i) for i in range(N) if i not in kept)
            kept += [i for _, i in rest[: max(0, places[layer][head] - len(kept))]]
            out[layer, head, kept] = True
    return out


@every_policy
@every_ratio
def test_it_is_the_best_scores_by_loops(policy, ratio, tiny):
    scored = scored_of(tiny, policy)
    choice = policy.choose(scored, ratio)
    protected = protected_of(policy, scored, choice)
    alpha = Fraction(str(getattr(policy.selector, "alpha", 0.5)))
    least = at_least_of(policy, scored, ratio)
    places = [[max(int(alpha * int(b)), min(least, int(b))) for b in row] for row in choice.budgets]
    found = policy.first_stage(scored, ratio)
    assert found.dtype == torch.bool and found.shape == choice.keep.shape
    assert torch.equal(found, slow_first(scored, policy, choice, protected, places))


def at_least_of(policy, scored, ratio):
    """What AdaKV guarantees every head: ⌊0.2 b⌋ entries, which stage 1 holds in any case."""
    if policy.budget.name != "adakv":
        return policy.sets(scored, ratio, entries(N, ratio))[1].at_least
    return int(Fraction(str(policy.budget.safeguard)) * entries(N, ratio))


@every_policy
@every_ratio
def test_it_lies_within_what_is_kept_and_holds_what_is_protected(policy, ratio, tiny):
    for each in filter(None, (policy, at_query_heads(policy))):
        scored = scored_of(tiny, each)
        choice = each.choose(scored, ratio)
        found = each.first_stage(scored, ratio)
        assert not bool((found & ~choice.keep).any())
        assert not bool((protected_of(each, scored, choice) & ~found).any())
        smaller = each.first_stage(scored, ratio, alpha=0.25)
        assert not bool((smaller & ~each.first_stage(scored, ratio, alpha=0.5)).any())


@every_policy
def test_alpha_one_is_top_k_and_alpha_nought_is_what_must_stay(policy, tiny):
    scored = scored_of(tiny, policy)
    topk = replace(policy, selector=eviction.policy("snapkv").selector)
    assert torch.equal(policy.first_stage(scored, "0.5", alpha=1), topk.choose(scored, "0.5").keep)
    least = policy.first_stage(scored, "0.5", alpha=0)
    if policy.budget.name != "adakv":  # whose safeguard is part of stage 1
        assert torch.equal(least, protected_of(policy, scored, policy.choose(scored, "0.5")))


@pytest.mark.parametrize("name", ["snapkv", "adakv", "tova", "h2o"])
def test_without_a_second_stage_it_is_that_of_the_policy_with_one(name, tiny):
    """Same scores, same budgets: the σ of attention-only selection is that of Algorithm 1 put on it."""
    settings = {"window": 4, "kernel": 3} if name in ("snapkv", "adakv") else {}
    base, ours = eviction.policy(name, **settings), eviction.policy(f"{name}+two_stage", **settings)
    seen = eviction.measure(tiny("llama"), catalogue.ids(2, N), [base, ours])
    for ratio in ("0.3", "0.6"):
        one, other = (each.first_stage(seen.scored(each), ratio) for each in (base, ours))
        assert torch.equal(one, other)
    kept = ours.choose(seen.scored(ours), "0.6").keep
    assert not torch.equal(kept, base.choose(seen.scored(base), "0.6").keep)


def test_alpha_is_the_selectors_own_unless_given(tiny):
    policy = eviction.policy("tova+two_stage", alpha=0.25)
    scored = scored_of(tiny, policy)
    sizes = {
        alpha: set(policy.first_stage(scored, "0.5", alpha).sum(-1).flatten().tolist()) for alpha in (None, 0.5, 1)
    }
    assert sizes == {None: {3}, 0.5: {6}, 1: {12}}
    assert set(eviction.policy("tova").first_stage(scored, "0.5").sum(-1).flatten().tolist()) == {6}
    assert policy.selector.alpha == 0.25


@pytest.mark.parametrize(
    ("alpha", "budget"), [(0.1, 30), (0.7, 10), (0.29, 100), (0.57, 100), (1, 7), (0, 7), (0.3, 10)]
)
def test_shares_of_a_budget_are_exact(alpha, budget):
    """⌊0.29 · 100⌋ is 29, and 28 in floating point."""
    assert stage1_places(alpha, budget) == int(Fraction(str(alpha)) * budget)
    assert stage1_places(alpha, budget, 4) == max(int(Fraction(str(alpha)) * budget), 4)
    assert stage1_places(alpha, budget, 1000) == budget


@pytest.mark.parametrize("alpha", [-0.1, 1.5, "half", True, float("nan")])
def test_an_alpha_that_is_no_share_is_refused(alpha, tiny):
    policy = eviction.policy("tova")
    with pytest.raises(EvictionError, match="allowed: a share between 0 and 1"):
        policy.first_stage(scored_of(tiny, policy), "0.5", alpha)


def test_two_stage_select_begins_with_it(tiny):
    """With a constant value norm and ε = 0 the second stage continues in the order of the first."""
    policy = eviction.policy("tova+two_stage", epsilon=0.0)
    scored = scored_of(tiny, policy)
    first, kept = policy.first_stage(scored, "0.5"), policy.choose(scored, "0.5").keep
    for layer, each in enumerate(scored):
        terms = each.scores.double() * each.norms(1).double()
        for head in range(2):
            rest = sorted((-float(terms[head, i]), i) for i in range(N) if not first[layer, head, i])
            expected = {i for i in range(N) if first[layer, head, i]} | {i for _, i in rest[:6]}
            assert {i for i in range(N) if kept[layer, head, i]} == expected
    assert isinstance(policy.selector, TwoStage)

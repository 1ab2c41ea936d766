"""The table of cells against loops over plain transformers' own attention, values and projections."""

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import small_documents as small
import torch
from small_documents import behind
from tiny import FAMILIES

from kvprobe import cells, eviction
from kvprobe.cells import Arm
from kvprobe.errors import EvictionError, TheoryError

families = pytest.mark.parametrize("family", FAMILIES)
both_norms = pytest.mark.parametrize("p", [1, 2])
CACHES = ("0.25", "0.5")
HEADS = ["mass", "retained", "value_mass", "perturbation", "centred_bound", "bound"]
STAGES = ["stage2_bound", "relaxed_bound", "relaxed_candidates"]


def close(mine, truth, what):
    """To fp32's accuracy of the model that both are read off; NaN alike."""
    np.testing.assert_allclose(np.asarray(mine, float), np.asarray(truth, float), rtol=2e-3, atol=2e-4, err_msg=what)


def arms_of(policies, caches=CACHES, alpha=None):
    return [Arm(policy, cache, alpha) for policy in policies for cache in caches]


def cell(table, arm, layer, **more):
    at = (table["policy"] == arm.policy.name) & (table["cache"] == float(arm.cache)) & (table["layer"] == layer)
    for name, value in more.items():
        at &= table[name] == value
    found = table[at]
    assert len(found) == 1
    return found.iloc[0]


def slow_first(scored, policy, cache, alpha=0.5):
    """N′ [L, J, stop] for equal budgets: the set that top-k keeps of ⌊αb⌋ entries, and at least what is protected."""
    stop = scored[0].layer.length
    base = eviction.policies.entries(stop, cache)
    top = replace(policy, selector=eviction.policy("snapkv").selector)
    most = max(
        int(policy.scorer.protected(each.layer, torch.tensor([base] * each.scores.shape[0])).sum(-1).max())
        for each in scored
    )
    return top.choose(scored, None, base=max(int(alpha * base), most, 1)).keep


@pytest.mark.slow
@families
@both_norms
def test_every_cell_is_a_loop_over_plain_transformers_own_tensors(family, p, tiny, plain64):
    model, policies = tiny(family), small.policies()
    moved = checked = 0
    for doc in small.documents_for(family, 2):
        arms = arms_of(policies)
        found = cells.measure(cells.probe(model, doc, policies), arms, p=p)
        ids, stop = small.whole(plain64(family), doc)
        layers = small.rows_of(plain64(family), ids)
        keeps = {policy.name: {c: policy.select(model, ids[:stop], c) for c in CACHES} for policy in policies}
        assert len(found.heads) == len(arms) * 3 * 6 and len(found.layers) == len(arms) * 3
        assert set(found.heads["doc"]) == set(found.layers["doc"]) == {doc.name}
        for arm in arms:
            keep = keeps[arm.policy.name][arm.cache]
            for layer, (A, V, W) in enumerate(layers):
                changes, sure = [], True
                for head in range(6):
                    mine = keep[layer, head * keep.shape[1] // 6]
                    kept = behind(mine, len(ids))
                    truth = small.head_measures(A[head], V[head * len(V) // 6], W[head], kept, p)
                    row = cell(found.heads, arm, layer, head=head)
                    assert row["kept"] == int(mine.sum())
                    # what an fp32 row lacks to 1 (a learned sink) has no digits left below 1e-7
                    names = HEADS if truth["retained"] > 1e-4 else ["mass", "retained", "value_mass"]
                    close(
                        [row[name] for name in names],
                        [truth[name] for name in names],
                        f"{arm.policy.name} {layer} {head}",
                    )
                    sure &= len(names) > 3
                    checked += len(names) > 3
                    changes.append(truth["change"])
                    moved += truth["perturbation"] > 1e-3
                whole = small.size(sum(changes), p)
                if sure:
                    close(cell(found.layers, arm, layer)["perturbation"], whole, f"{arm.policy.name} {layer}")
    assert moved > 50 and checked > 0.9 * 2 * len(policies) * len(CACHES) * 18


@families
def test_stages_are_loops_over_the_rows_of_plain_transformers(family, tiny, plain64):
    """σ, the best mass of that size, θ̂ and both relaxed bounds; N′ as top-k of ⌊αb⌋ entries, for equal budgets."""
    model, policies = tiny(family), [small.policies()[i] for i in (0, 1, 4)]
    valid = 0
    for doc in small.documents_for(family, 2):
        arms = arms_of(policies)
        probed = cells.probe(model, doc, policies)
        found = cells.measure(probed, arms, stages=True)
        ids, stop = small.whole(plain64(family), doc)
        layers = small.rows_of(plain64(family), ids)
        for arm in arms:
            scored = probed.measured.scored(arm.policy)
            keep, first = arm.policy.choose(scored, arm.cache).keep, slow_first(scored, arm.policy, arm.cache)
            for layer, (A, V, W) in enumerate(layers):
                for head in range(6):
                    at = head * keep.shape[1] // 6
                    kept, one = behind(keep[layer, at], len(ids)), behind(first[layer, at], len(ids))
                    m = [small.size(V[head * len(V) // 6, i] @ W[head], 1) for i in range(len(ids))]
                    truth = small.stage_measures(A[head], m, kept, one)
                    row = cell(found.heads, arm, layer, head=head)
                    assert row["stage1"] == int(first[layer, at].sum())
                    close(row["sigma"], truth["sigma"], "sigma")
                    best = sorted(A[head, :stop], reverse=True)[: int(row["stage1"])]
                    never = 1.0 - sum(A[head, :stop])  # what follows the context, and a learned sink
                    close(row["sigma_oracle"], sum(best) + never, "sigma_oracle")
                    if abs(truth["sigma"] - 0.5) > 1e-4:
                        close([row[name] for name in STAGES], [truth[name] for name in STAGES], f"{arm} {layer} {head}")
                        valid += truth["sigma"] > 0.5
    assert valid > 20


@families
def test_sigma_is_at_most_what_the_best_set_of_that_size_holds(family, tiny):
    policies = small.policies()
    for doc in small.documents_for(family, 3):
        table = cells.measure(cells.probe(tiny(family), doc, policies), arms_of(policies), stages=True).heads
        assert bool((table["sigma"] <= table["sigma_oracle"] + 1e-12).all())
        assert bool((table["sigma_oracle"] <= 1 + 1e-9).all())
        assert bool((table["sigma"] <= table["retained"] + 1e-12).all())
        assert bool((table["stage1"] <= table["kept"]).all())
        assert (table["sigma_oracle"] - table["sigma"]).max() > 1e-3


@families
@both_norms
def test_the_chain_of_bounds_holds_in_every_cell(family, p, tiny):
    policies = small.policies()
    for doc in small.documents_for(family, 3):
        found = cells.measure(cells.probe(tiny(family), doc, policies), arms_of(policies), p=p, stages=True)
        table, slack = found.heads, 1 + 1e-10
        chain = ["perturbation", "centred_bound", "bound", "stage2_bound", "relaxed_candidates", "relaxed_bound"]
        for low, high in itertools.pairwise(chain):
            assert not (table[low] > table[high] * slack).any(), (low, high)
        assert table["stage2_bound"].isna().equals(table["sigma"] <= 0.5)
        sums = table.groupby(["policy", "cache", "layer"], sort=False)["perturbation"].sum().to_numpy()
        assert (found.layers["perturbation"].to_numpy() <= sums * slack).all()


@families
def test_alpha_one_is_the_policy_without_a_second_stage(family, tiny):
    base, ours = eviction.policy("snapkv", **small.SMALL), eviction.policy("snapkv+two_stage", alpha=1, **small.SMALL)
    probed = cells.probe(tiny(family), small.document(2), [base, ours])
    table = cells.measure(probed, arms_of([base, ours]), stages=True).heads
    one, other = (
        table[table["policy"] == each.name].drop(columns=["policy", "stage1", "sigma", "sigma_oracle", *STAGES])
        for each in (base, ours)
    )
    assert one.reset_index(drop=True).equals(other.reset_index(drop=True))
    mine = table[table["policy"] == ours.name]
    assert (mine["stage1"] == mine["kept"]).all() and np.allclose(mine["sigma"], mine["retained"])
    valid = mine[mine["sigma"] > 0.5]
    assert len(valid) and np.allclose(valid["stage2_bound"], valid["bound"])


def test_an_arms_alpha_moves_the_first_stage_and_not_what_is_kept(tiny):
    policies = small.policies()[:2]
    probed = cells.probe(tiny("llama"), small.document(2), policies)
    tables = {
        a: cells.measure(probed, arms_of(policies, ("0.5",), a), stages=True).heads for a in (None, 0.5, 0.25, 0.0)
    }
    assert tables[None].equals(tables[0.5])  # 0.5 is two_stage's own, and what a policy without stages is given
    for alpha, places in ((0.25, 3), (0.5, 6), (0.0, 1)):  # of 12, the window's one among them
        assert set(tables[alpha]["stage1"]) == {places}
        assert tables[alpha][[*HEADS, "kept"]].equals(tables[None][[*HEADS, "kept"]])


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_the_whole_cache_is_no_change(family, tiny):
    policies = small.policies()
    found = cells.measure(
        cells.probe(tiny(family), small.document(1), policies), arms_of(policies, ("1",)), stages=True
    )
    assert (found.heads[["mass", "value_mass", "perturbation", "centred_bound", "bound"]] == 0).all(axis=None)
    assert (found.layers["perturbation"] == 0).all() and (found.heads["kept"] == small.STOP).all()


def test_arms_given_together_are_arms_given_alone(tiny):
    """Neither the other policies nor the other sizes matter to an arm, nor does handing over what is kept."""
    policies = small.policies()
    arms = arms_of(policies)
    probed = cells.probe(tiny("llama"), small.document(3), policies)
    together = cells.measure(probed, arms, stages=True)
    for arm in arms[::3]:
        alone = cells.measure(cells.probe(tiny("llama"), small.document(3), [arm.policy]), [arm], stages=True)
        at = (together.heads["policy"] == arm.policy.name) & (together.heads["cache"] == float(arm.cache))
        pd.testing.assert_frame_equal(together.heads[at].reset_index(drop=True), alone.heads, rtol=1e-5, atol=1e-6)
    handed = cells.measure(probed, arms, stages=True, choices=cells.choose(probed, arms))
    assert handed.heads.equals(together.heads) and handed.layers.equals(together.layers)


def test_sets_of_query_heads_are_measured_head_by_head(tiny, plain64):
    policy = replace(eviction.policy("snapkv", **small.SMALL), granularity="query_head")
    doc = small.document(4)
    found = cells.measure(cells.probe(tiny("llama"), doc, [policy]), [Arm(policy, "0.25")]).heads
    ids, stop = small.whole(plain64("llama"), doc)
    keep = policy.select(tiny("llama"), ids[:stop], "0.25")
    assert keep.shape[1] == 6 and any(not torch.equal(keep[0, 0], keep[0, h]) for h in (1, 2))
    for layer, (A, V, W) in enumerate(small.rows_of(plain64("llama"), ids)):
        for head in range(6):
            truth = small.head_measures(A[head], V[head // 3], W[head], behind(keep[layer, head], len(ids)), 1)
            row = cell(found, Arm(policy, "0.25"), layer, head=head)
            close(row["perturbation"], truth["perturbation"], f"{layer} {head}")


def test_documents_side_by_side_are_documents_one_by_one(tiny):
    policies = small.policies()[:2]
    parts = [
        cells.measure(cells.probe(tiny("llama"), doc, policies), arms_of(policies))
        for doc in small.documents_for("llama")
    ]
    found = cells.joined(iter(parts))
    assert found.heads["doc"].unique().tolist() == ["doc-0", "doc-1", "doc-2"]
    for part in parts:
        for name in ("heads", "layers"):
            whole, one = getattr(found, name), getattr(part, name)
            assert whole[whole["doc"] == one["doc"][0]].reset_index(drop=True).equals(one)
    assert found.heads.index.is_unique and found.layers.index.is_unique


def test_caches_are_kept_as_numbers_whatever_they_were_written_as(tiny):
    policy = small.policies()[0]
    found = cells.measure(
        cells.probe(tiny("llama"), small.document(1), [policy]), [Arm(policy, "1/4"), Arm(policy, " 0.5")]
    )
    assert found.heads["cache"].unique().tolist() == [0.25, 0.5]


def test_arms_that_cannot_be_told_apart_or_keep_nothing_are_refused(tiny):
    policy, model = small.policies()[0], tiny("llama")
    cells.refuse(model, 24, 1, [Arm(policy, "0.25"), Arm(policy, "0.5"), Arm(replace(policy, label="other"), "0.25")])
    with pytest.raises(EvictionError, match="snapkv at cache 1/4 is given twice"):
        cells.refuse(model, 24, 1, [Arm(policy, "0.25"), Arm(policy, "1/4")])
    with pytest.raises(EvictionError, match=r"cache 0.01 of 24 tokens is no entry at all"):
        cells.refuse(model, 24, 1, [Arm(policy, "0.25"), Arm(policy, "0.01")])
    with pytest.raises(EvictionError, match="looks at the last 32 queries and the context has 24 tokens"):
        cells.refuse(model, 24, 1, [Arm(eviction.policy("snapkv"), "0.25")])
    with pytest.raises(EvictionError, match="allowed: a share to keep"):
        cells.refuse(model, 24, 1, [Arm(policy, "nan")])


def test_a_policy_that_was_not_measured_is_refused(tiny):
    probed = cells.probe(tiny("llama"), small.document(1), small.policies()[:1])
    with pytest.raises(EvictionError, match="tova was not among the policies measured"):
        cells.measure(probed, [Arm(eviction.policy("tova"), "0.5")])
    with pytest.raises(TheoryError, match="p = 3"):
        cells.measure(probed, [Arm(small.policies()[0], "0.5")], p=3)

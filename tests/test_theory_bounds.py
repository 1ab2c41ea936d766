"""Laws 5–7 and 11: what bounds the perturbation, and in which order."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_heads import evicted, heads, random_heads, slow_norm, slow_output, slow_row
from torch.testing import assert_close

from kvprobe import theory
from kvprobe.errors import TheoryError

law = settings(max_examples=60, deadline=None, derandomize=True)
both_norms = pytest.mark.parametrize("p", [1, 2])
with_and_without_sink = pytest.mark.parametrize("sink", [False, True])
ROUNDING = 1 + 1e-12


def measures(head, p):
    m = theory.value_norms(head.V, head.W_O, p)
    return (
        theory.perturbation(head.A, head.V, head.W_O, head.keep, p, head.sink_mass),
        theory.centred_bound(head.A, head.V, head.W_O, head.keep, p, head.sink_mass),
        theory.bound(head.A, m, head.keep, head.sink_mass),
    )


@both_norms
@law
@given(head=heads())
def test_law_5_bound_against_loops(p, head):
    row, dead = slow_row(head), evicted(head)
    after = slow_row(head, dead)
    one_hot = [[float(i == j) for j in range(len(row))] for i in range(len(row))]
    m = [slow_norm(slow_output(key, head), p) for key in one_hot]
    norms = theory.value_norms(head.V, head.W_O, p)
    assert_close(norms, torch.tensor(m, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    slow = sum(abs(a - b) * norm for a, b, norm in zip(row, after, m, strict=True))
    theta = theory.bound(head.A, norms, head.keep, head.sink_mass)
    assert theta.item() == pytest.approx(slow, rel=1e-8, abs=1e-13 * max(m))
    w_S = sum(row[i] * m[i] for i in dead)
    assert theory.value_mass(head.A, norms, head.keep).item() == pytest.approx(w_S, rel=1e-8, abs=1e-13 * max(m))


@with_and_without_sink
def test_law_5_stable_form_is_the_closed_form_of_the_paper(sink):
    head = random_heads(1, 500, sink=sink)
    m = theory.value_norms(head.V, head.W_O)
    R = theory.retained(head.A, head.keep, head.sink_mass)
    C = (head.A * m).sum(-1)
    closed = C - (2 - 1 / R) * (head.A * m * head.keep).sum(-1)
    ordinary = R > 1e-3
    theta = theory.bound(head.A, m, head.keep, head.sink_mass)
    assert_close(theta[ordinary], closed[ordinary], rtol=1e-9, atol=1e-11)


def test_law_5_bound_is_not_a_function_of_the_evicted_value_mass():
    A = torch.tensor([0.5, 0.01, 0.49], dtype=torch.float64)
    m = torch.tensor([0.1, 5.0, 1.0], dtype=torch.float64)
    large_mass, small_mass = (torch.arange(3) != i for i in (0, 1))
    assert_close(theory.value_mass(A, m, large_mass), theory.value_mass(A, m, small_mass))
    assert theory.bound(A, m, large_mass) / theory.bound(A, m, small_mass) > 1.72


def stage1_of(head, seed):
    chosen = torch.rand(head.keep.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return head.keep & chosen


@law
@given(heads(), st.integers(0, 2**31))
def test_laws_6_and_7_chain_of_bounds(head, seed):
    stage1 = stage1_of(head, seed)
    sigma = theory.retained(head.A, stage1, head.sink_mass)
    A, m = head.A, theory.value_norms(head.V, head.W_O)
    theta_hat = theory.stage2_bound(A, m, stage1, head.keep, head.sink_mass)
    relaxed, candidates = (
        theory.relaxed_bound(A, m, stage1, head.keep, head.sink_mass, over=over) for over in ("visible", "candidates")
    )
    assert bool(theta_hat.isnan() == (sigma <= 0.5)) and bool(relaxed.isnan() == (sigma <= 0.5))
    assume(sigma > 0.5)
    stage2 = head.keep & ~stage1
    c = 2 - 1 / sigma
    C_prime = (A * m).sum() - c * (A * m * stage1).sum()
    atol = 1e-12 * float(m.max())
    assert_close(theta_hat, C_prime - c * (A * m * stage2).sum(), rtol=1e-9, atol=atol)
    assert_close(relaxed, C_prime - m[A > 0].min() * c * (A * stage2).sum(), rtol=1e-9, atol=atol)
    assert_close(candidates, C_prime - m[(A > 0) & ~stage1].min() * c * (A * stage2).sum(), rtol=1e-9, atol=atol)
    theta = theory.bound(A, m, head.keep, head.sink_mass)
    assert theta <= theta_hat * ROUNDING
    assert theta_hat <= candidates * ROUNDING
    assert candidates <= relaxed * ROUNDING


@with_and_without_sink
def test_law_6_with_no_stage_2_it_is_the_bound(sink):
    head = random_heads(2, 300, sink=sink)
    m = theory.value_norms(head.V, head.W_O)
    sure = theory.retained(head.A, head.keep, head.sink_mass) > 0.5
    theta = theory.bound(head.A, m, head.keep, head.sink_mass)
    theta_hat = theory.stage2_bound(head.A, m, head.keep, head.keep, head.sink_mass)
    assert sure.any() and not sure.all()
    assert_close(theta_hat[sure], theta[sure], rtol=1e-12, atol=0)
    assert bool(theta_hat[~sure].isnan().all())


def test_law_6_above_one_half_the_top_of_A_m_is_the_best_stage_2():
    A = torch.tensor([0.6, 0.2, 0.1, 0.06, 0.04], dtype=torch.float64)
    m = torch.tensor([1.0, 0.3, 2.0, 1.5, 4.0], dtype=torch.float64)
    stage1 = torch.arange(5) < 1
    choices = list(itertools.combinations(range(1, 5), 2))
    keep = torch.stack([stage1 | torch.isin(torch.arange(5), torch.tensor(pair)) for pair in choices])
    theta_hat = theory.stage2_bound(A, m, stage1.expand_as(keep), keep)
    assert set(choices[int(theta_hat.argmin())]) == set((1 + (A * m)[1:].topk(2).indices).tolist())
    relaxed = theory.relaxed_bound(A, m, stage1.expand_as(keep), keep)
    assert set(choices[int(relaxed.argmin())]) == set((1 + A[1:].topk(2).indices).tolist())


def test_law_6_evicting_from_stage_2_raises_the_bound_by_its_value_mass():
    head = random_heads(3, 200, sink=True)
    m = theory.value_norms(head.V, head.W_O)
    stage1 = torch.zeros_like(head.keep)
    everything = torch.ones_like(head.keep)
    sigma = theory.retained(head.A, stage1, head.sink_mass)
    change = theory.stage2_bound(head.A, m, stage1, head.keep, head.sink_mass) - theory.stage2_bound(
        head.A, m, stage1, everything, head.sink_mass
    )
    expected = (2 - 1 / sigma) * theory.value_mass(head.A, m, head.keep)
    sure = sigma > 0.5
    assert sure.sum() > 50
    assert_close(change[sure], expected[sure], rtol=1e-9, atol=1e-12)


def test_law_7_a_tiny_first_value_norm_loosens_the_minimum_over_all_keys():
    A = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    m = torch.tensor([0.01, 1.0, 2.0], dtype=torch.float64)
    stage1, keep = torch.tensor([True, False, False]), torch.tensor([True, True, False])
    c = 2 - 1 / 0.7
    everywhere, candidates = (theory.relaxed_bound(A, m, stage1, keep, over=over) for over in ("visible", "candidates"))
    assert_close(everywhere - candidates, torch.tensor(0.99 * c * 0.2, dtype=torch.float64))
    assert_close(candidates, theory.stage2_bound(A, m, stage1, keep))


def test_laws_6_and_7_errors():
    A, m = torch.tensor([0.5, 0.5]), torch.ones(2)
    yes, first = torch.tensor([True, True]), torch.tensor([True, False])
    with pytest.raises(TheoryError, match=r"stage1 holds key \[1\], which keep evicts"):
        theory.stage2_bound(A, m, yes, first)
    with pytest.raises(TheoryError, match=r"over = 'all'; allowed: 'visible', 'candidates'"):
        theory.relaxed_bound(A, m, first, yes, over="all")


@both_norms
@with_and_without_sink
def test_law_11_a_hundred_thousand_heads_without_a_violation(p, sink):
    violations = 0
    for seed in range(10):
        exact, theta_c, theta = measures(random_heads(seed, 10_000, n=8, d=3, D=6, sink=sink), p)
        violations += int((~(exact <= theta_c * ROUNDING)).sum() + (~(theta_c <= theta * ROUNDING)).sum())
    assert violations == 0


@both_norms
@law
@given(head=heads())
def test_law_11_order_and_loops(p, head):
    exact, theta_c, theta = measures(head, p)
    assert exact <= theta_c * ROUNDING
    assert theta_c <= theta * ROUNDING
    after = slow_output(slow_row(head, evicted(head)), head)
    slow = 0.0
    for i in evicted(head):
        value = slow_output([float(j == i) for j in range(len(head.logits))], head)
        slow += float(head.A[i]) * slow_norm([a - b for a, b in zip(after, value, strict=True)], p)
    noise = 1e-12 * float(head.V.abs().max() * head.W_O.abs().sum())
    assert theta_c.item() == pytest.approx(slow, rel=1e-8, abs=noise)


@both_norms
@with_and_without_sink
def test_law_11_single_keys_are_exact(p, sink):
    head = random_heads(4, 1000, sink=sink)
    single = torch.arange(12) != torch.arange(1000)[:, None] % 12
    exact = theory.perturbation(head.A, head.V, head.W_O, single, p, head.sink_mass)
    theta_c = theory.centred_bound(head.A, head.V, head.W_O, single, p, head.sink_mass)
    assert_close(theta_c, exact, rtol=1e-10, atol=0)


@both_norms
def test_law_11_centring_at_the_clean_output_would_be_no_bound(p):
    """Σ_S A_i ‖o − 𝒱_i‖ needs a factor 1/R, and with it exceeds θ for some heads."""
    head = random_heads(5, 2000)
    exact, _, theta = measures(head, p)
    z = (head.A.unsqueeze(-2) @ head.V).squeeze(-2)
    around_o = theory.projected_norms(head.V - z.unsqueeze(-2), head.W_O, p)
    wrong = (head.A * ~head.keep * around_o).sum(-1)
    R = theory.retained(head.A, head.keep)
    ordinary = R > 1e-3  # below, V_i − o cancels
    assert (wrong < 0.99 * exact)[ordinary].any()
    assert bool((exact <= wrong / R * (1 + 1e-9))[ordinary].all())
    assert (wrong / R > 1.01 * theta)[ordinary].any()

"""Laws 8–10: graded masks, layers and queries, value gates; and the domains of all formulas."""

import math

import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError, jaxtyped
from random_heads import heads, random_heads
from torch.testing import assert_close

from kvprobe import theory
from kvprobe.errors import TheoryError

law = settings(max_examples=60, deadline=None, derandomize=True)
both_norms = pytest.mark.parametrize("p", [1, 2])
with_and_without_sink = pytest.mark.parametrize("sink", [False, True])


@law
@given(heads(), st.floats(0.01, 60))
def test_law_8_one_bias_scales_the_whole_effect_by_kappa(head, beta):
    A, sink_mass = head.A, head.sink_mass
    biased = theory.attention(head.logits - beta * (~head.keep).double(), head.sink)[0]
    soft = theory.renormalise_soft(A, torch.exp(-beta * (~head.keep).double()), sink_mass)
    assert_close(soft, biased, rtol=1e-11, atol=0)
    kappa = theory.kappa(beta, theory.retained(A, ~head.keep), theory.retained(A, head.keep, sink_mass))
    full = theory.perturbation_vector(A, head.V, head.W_O, head.keep, sink_mass)
    noise = 1e-12 * float(head.V.abs().max() * head.W_O.abs().sum())
    assert_close((biased - A) @ head.V @ head.W_O, kappa * full, rtol=1e-9, atol=noise)
    m = theory.value_norms(head.V, head.W_O)
    theta = kappa * theory.bound(A, m, head.keep, sink_mass)
    assert_close(theory.fractional_bound(A, biased, m), theta, rtol=1e-9, atol=1e-12 * float(m.max()))


@law
@given(heads(), st.integers(0, 2**31))
def test_law_8_fractional_bound_holds_for_any_weights(head, seed):
    weights = torch.rand(head.A.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    after = theory.renormalise_soft(head.A, weights, head.sink_mass)
    exact = ((after - head.A) @ head.V @ head.W_O).abs().sum()
    theta = theory.fractional_bound(head.A, after, theory.value_norms(head.V, head.W_O))
    assert exact <= theta * (1 + 1e-9) + 1e-12


@law
@given(st.floats(0, 1 - 1e-9), st.floats(1e-6, 30), st.floats(1e-6, 10))
def test_law_8_kappa_closed_form_and_monotone(a_S, beta, step):
    e = math.exp(-beta)
    closed = (1 - e) * (1 - a_S) / (1 - a_S * (1 - e))
    assert theory.kappa(beta, a_S).item() == pytest.approx(closed, rel=1e-5)
    below, above = theory.kappa(beta, a_S), theory.kappa(beta + step, a_S)
    assert 0 < below <= above <= 1
    if math.exp(-beta) * -math.expm1(-step) * (1 - a_S) > 1e-14:  # what float64 can tell apart near 1
        assert below < above
    assert theory.kappa(0.0, a_S) == 0
    assert theory.kappa(math.inf, a_S) == 1


@law
@given(st.floats(0, 1), st.floats(0, 1 - 1e-12))
def test_law_8_kappa_inverse(kappa, a_S):
    beta = theory.kappa_inverse(kappa, a_S)
    assert beta >= 0
    assert theory.kappa(beta, a_S).item() == pytest.approx(kappa, rel=1e-9, abs=1e-300)


def test_law_8_heads_with_all_their_mass_in_S_need_a_large_bias():
    R = torch.tensor([1e-3, 1e-9, 1e-15, 1e-30], dtype=torch.float64)
    half = theory.kappa_inverse(0.5, 1 - R, R)
    assert_close(half, torch.log1p(1 / R), rtol=1e-12, atol=0)
    assert bool((half >= torch.log((1 - R) / R)).all())
    assert_close(theory.kappa(half, 1 - R, R), torch.full_like(R, 0.5))


def test_law_8_a_uniform_bias_on_a_full_row_changes_nothing():
    A = random_heads(1, 20).A
    assert_close(theory.renormalise_soft(A, torch.full_like(A, 0.01)), A)


@both_norms
@with_and_without_sink
def test_law_9_layer_is_the_sum_of_its_heads_and_below_their_sum(p, sink):
    """6 query heads on 2 kv heads: head h reads h // 3. (h % 2 would read others and fail.)"""
    H, G = 6, 3
    head = random_heads(2, 40, H, sink=sink)
    V, W_O = head.V[:, ::G], head.W_O[0]
    args = [(head.A[:, h], V[:, h // G], W_O[h], head.keep[:, h]) for h in range(H)]
    sinks = [head.sink_mass[:, h] if sink else None for h in range(H)]
    vectors = [theory.perturbation_vector(*a, s) for a, s in zip(args, sinks, strict=True)]
    exact_heads = sum(theory.perturbation(*a, p, s) for a, s in zip(args, sinks, strict=True))
    exact = theory.layer_perturbation(head.A, V, W_O, head.keep, p, head.sink_mass)
    assert_close(exact, torch.linalg.vector_norm(sum(vectors), p, -1), rtol=1e-10, atol=0)
    m = theory.value_norms(theory.per_query_head(V, H), W_O, p)
    theta = theory.layer_bound(head.A, m, head.keep, head.sink_mass)
    assert bool((exact <= exact_heads * (1 + 1e-12)).all()) and bool((exact_heads <= theta * (1 + 1e-12)).all())
    assert (exact < 0.9 * exact_heads).any()


def test_law_9_the_bound_of_a_mean_row_does_not_bound_the_mean():
    """Bound first, then average over queries."""
    A = torch.tensor([[0.999, 0.001, 0.0], [0.001, 0.0, 0.999]], dtype=torch.float64)
    V = torch.tensor([[0.0], [1.0], [0.0]], dtype=torch.float64)
    W_O, keep = torch.ones(1, 1, dtype=torch.float64), torch.tensor([False, True, True])
    m = theory.value_norms(V, W_O)
    exact = theory.perturbation(A, V, W_O, keep).mean()
    assert theory.bound(A.mean(0), m, keep) < 0.01 * exact
    assert exact <= theory.bound(A, m, keep).mean()


@both_norms
@law
@given(head=heads(), scale=st.floats(-2, 3))
def test_law_10_value_gate_changes_values_and_nothing_else(p, head, scale):
    S = ~head.keep
    gated = torch.where(S[:, None], scale * head.V, head.V)
    difference = head.A @ gated @ head.W_O - head.A @ head.V @ head.W_O
    noise = 1e-12 * float(head.V.abs().max() * head.W_O.abs().sum())
    vector = theory.value_gate_vector(head.A, head.V, head.W_O, S, scale)
    assert_close(vector, difference, rtol=1e-9, atol=noise)
    norm = torch.linalg.vector_norm(vector, p)
    assert_close(theory.value_gate(head.A, head.V, head.W_O, S, scale, p), norm, rtol=1e-12, atol=0)


def test_law_10_a_gate_of_one_changes_nothing_and_a_gate_is_not_an_eviction():
    head = random_heads(3, 50)
    assert bool((theory.value_gate(head.A, head.V, head.W_O, ~head.keep, 1.0) == 0).all())
    gate = theory.value_gate(head.A, head.V, head.W_O, ~head.keep, 0.0)
    eviction = theory.perturbation(head.A, head.V, head.W_O, head.keep)
    assert ((gate / eviction - 1).abs() > 0.1).float().mean() > 0.5


A, V, W_O = torch.full((2, 3), 1 / 3), torch.ones(2, 3, 4), torch.ones(4, 5)
KEEP = torch.tensor([True, True, False])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.renormalise(A, KEEP.float()), r"keep is torch\.float32; allowed: torch\.bool"),
        (lambda: theory.renormalise(A, KEEP[:2]), r"keep has the shape \[2\]; allowed with A \[2, 3\]: \[\.\.\., 3\]"),
        (lambda: theory.renormalise(A, KEEP.expand(5, 3)), r"keep has the shape \[5, 3\]"),
        (
            lambda: theory.renormalise(A.bfloat16(), KEEP),
            r"A is torch\.bfloat16; allowed: torch\.float32, torch\.float64",
        ),
        (lambda: theory.renormalise(A.half(), KEEP), r"A is torch\.float16"),
        (lambda: theory.renormalise(A.sum(), KEEP), r"A is a scalar"),
        (lambda: theory.retained(A, KEEP, torch.ones(3)), r"sink_mass has the shape \[3\]; .* one number a row, \[2\]"),
        (lambda: theory.renormalise_soft(A, 2 * A.exp()), r"weights span \[2\.79\d*, 2\.79\d*\]; allowed: \[0, 1\]"),
        (lambda: theory.correct(A, torch.ones(3)), r"sink_mass has the shape \[3\]"),
        (lambda: theory.bound(A, torch.ones(4), KEEP), r"m has the shape \[4\]"),
        (lambda: theory.perturbation(A, V[:, :2], W_O, KEEP), r"V has the shape \[2, 2, 4\]; allowed with A \[2, 3\]"),
        (lambda: theory.perturbation(A, V, W_O.T, KEEP), r"W_O has the shape \[5, 4\]; allowed with z \[2, 4\]"),
        (lambda: theory.perturbation(A, V, W_O, KEEP, 3), r"p = 3; allowed: 1, 2"),
        (lambda: theory.value_norms(V, W_O, 0), r"p = 0; allowed: 1, 2"),
        (
            lambda: theory.value_norms(V, W_O.T),
            r"W_O has the shape \[5, 4\]; allowed with X \[2, 3, 4\]: \[\.\.\., 4, D\]",
        ),
        (lambda: theory.value_gate(A, V, W_O, KEEP.int(), 0.5), r"S is torch\.int32; allowed: torch\.bool"),
        (lambda: theory.per_query_head(V[:, None], 0), None),
        (lambda: theory.per_query_head(V, 5), r"V has the shape \[2, 3, 4\]; allowed with 5 query heads"),
        (lambda: theory.kappa(-1.0, 0.5), r"beta = -1; allowed: beta >= 0"),
        (lambda: theory.kappa(1.0, 1.0), r"a_S = 1, R = 0; allowed: 0 <= a_S < 1, R > 0"),
        (lambda: theory.kappa_inverse(1.5, 0.5), r"kappa spans \[1\.5, 1\.5\]; allowed: \[0, 1\]"),
    ],
)
def test_domains_are_checked_in_one_line(call, message):
    if message is None:
        assert call().shape[1] == 0
        return
    with pytest.raises(TheoryError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@with_and_without_sink
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_and_dtypes_are_as_annotated(sink, dtype):
    """Every function on two leading dimensions, with the annotations enforced; the dtype of A is that of the result."""
    head = random_heads(4, 2, 3, sink=sink, dtype=dtype)
    A, V, W, keep, s = head.A, head.V, head.W_O, head.keep, head.sink_mass
    m, stage1 = theory.value_norms(V, W), keep & (A > 0.01)
    after = theory.renormalise(A, keep, s)
    calls = {
        "attention": (head.logits, head.sink),
        "retained": (A, keep, s),
        "renormalise": (A, keep, s),
        "renormalise_soft": (A, A.clamp(0.1, 1), s),
        "correct": (after, A.sum(-1)),
        "conditional": (A, keep, s),
        "value_norms": (V, W, 2),
        "projected_norms": (V, W, 1),
        "gram": (W,),
        "value_mass": (A, m, keep),
        "bound": (A, m, keep, s),
        "centred_bound": (A, V, W, keep, 2, s),
        "stage2_bound": (A, m, stage1, keep, s),
        "relaxed_bound": (A, m, stage1, keep, s),
        "fractional_bound": (A, after, m),
        "perturbation": (A, V, W, keep, 2, s),
        "perturbation_vector": (A, V, W, keep, s),
        "value_gate": (A, V, W, keep, 0.5, 2),
        "value_gate_vector": (A, V, W, keep, 0.5),
        "layer_perturbation": (A, V[:, :1], W[0], keep, 1, s),
        "layer_bound": (A, m, keep, s),
        "per_query_head": (V[:, :1], 3),
    }
    for name, arguments in calls.items():
        result = jaxtyped(typechecker=beartype)(getattr(theory, name))(*arguments)
        first = result[0] if name == "attention" else result
        assert first.dtype == dtype, name
    with pytest.raises(TypeCheckError):
        jaxtyped(typechecker=beartype)(theory.bound)(A, m, keep.to(dtype), s)

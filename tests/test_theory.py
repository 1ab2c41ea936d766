"""Laws 1–4: attention rows under a mask, and the exact perturbation of a head."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_heads import evicted, heads, random_heads, slow_norm, slow_output, slow_row
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from kvprobe import theory
from kvprobe.errors import TheoryError

law = settings(max_examples=60, deadline=None, derandomize=True)
both_norms = pytest.mark.parametrize("p", [1, 2])
with_and_without_sink = pytest.mark.parametrize("sink", [False, True])


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


@law
@given(heads())
def test_law_1_minus_infinity_on_logits_is_renormalisation(head):
    row = slow_row(head, evicted(head))
    masked, sink_mass = theory.attention(head.logits.masked_fill(~head.keep, -torch.inf), head.sink)
    assert_close(masked, f64(row), rtol=1e-12, atol=0)
    assert_close(theory.renormalise(head.A, head.keep, head.sink_mass), masked, rtol=1e-12, atol=0)
    rest = masked.sum() if sink_mass is None else masked.sum() + sink_mass
    assert_close(rest, f64(1.0), rtol=1e-14, atol=0)


@with_and_without_sink
def test_law_1_masked_weight_is_exactly_zero_at_large_negative_logits(sink):
    head = random_heads(1, 50, sink=sink)
    shifted, _ = theory.attention(head.logits - 2e5, None if head.sink is None else head.sink - 2e5)
    after = theory.renormalise(shifted, head.keep, head.sink_mass)
    assert bool((after[~head.keep] == 0).all())
    assert_close(after, theory.renormalise(head.A, head.keep, head.sink_mass), rtol=1e-9, atol=1e-12)


def test_law_1_a_row_that_sees_nothing_is_zero():
    blind = torch.full((2, 3), -torch.inf)
    assert bool((theory.attention(blind)[0] == 0).all())
    A, sink_mass = theory.attention(blind, torch.zeros(2))
    assert bool((A == 0).all()) and bool((sink_mass == 1).all())


@law
@given(heads())
def test_law_2_every_survivor_is_amplified_by_one_over_R(head):
    row = slow_row(head)
    R = math.fsum(a for a, kept in zip(row, head.keep.tolist(), strict=True) if kept)
    R += 0.0 if head.sink is None else 1 - math.fsum(row)
    ratio = theory.renormalise(head.A, head.keep, head.sink_mass)[head.keep] / head.A[head.keep]
    assert_close(ratio, torch.full_like(ratio, 1 / R), rtol=1e-9, atol=0)


def test_law_2_thirty_percent_evicted_inflates_by_1_43():
    after = theory.renormalise(f64([0.3, 0.5, 0.2]), torch.tensor([False, True, True]))
    assert_close(after, f64([0.0, 0.5 / 0.7, 0.2 / 0.7]))


def test_law_2_retained_mass_is_summed_over_what_is_kept():
    A = torch.tensor([1.0, 1e-12])
    keep = torch.tensor([False, True])
    assert theory.retained(A, keep) == A[1]
    assert 1 - theory.retained(A, ~keep) == 0
    assert bool((theory.renormalise(A, keep) == torch.tensor([0.0, 1.0])).all())


@with_and_without_sink
def test_law_2_soft_weights_of_0_and_1_are_a_mask(sink):
    head = random_heads(2, 50, sink=sink)
    hard = theory.renormalise(head.A, head.keep, head.sink_mass)
    assert_close(theory.renormalise_soft(head.A, head.keep.double(), head.sink_mass), hard, rtol=0, atol=0)


def test_no_retained_mass_raises_and_names_the_row():
    A = torch.full((2, 3, 4), 0.25)
    keep = torch.ones(2, 3, 4, dtype=torch.bool)
    keep[1, 2] = False
    V, W_O = torch.ones(4, 2), torch.ones(2, 5)
    calls = [
        lambda: theory.renormalise(A, keep),
        lambda: theory.renormalise_soft(A, keep.float()),
        lambda: theory.bound(A, A, keep),
        lambda: theory.perturbation(A, V, W_O, keep),
        lambda: theory.centred_bound(A, V, W_O, keep),
        lambda: theory.split_conditional(A * keep, A, keep),
    ]
    for call in calls:
        with pytest.raises(TheoryError, match=r"row \(1, 2\) of \(2, 3\) retains no attention mass"):
            call()


@both_norms
def test_only_a_learned_sink_left_gives_output_zero(p):
    head = random_heads(3, 20, sink=True)
    nothing = torch.zeros_like(head.keep)
    assert bool((theory.renormalise(head.A, nothing, head.sink_mass) == 0).all())
    o = (head.A.unsqueeze(-2) @ head.V @ head.W_O).squeeze(-2)
    L = theory.perturbation(head.A, head.V, head.W_O, nothing, p, head.sink_mass)
    assert_close(L, torch.linalg.vector_norm(o, p, -1), rtol=1e-10, atol=0)


@law
@given(heads(), st.integers(0, 2**31))
def test_law_3_splits_add_up(head, seed):
    plus = random_heads(seed, n=len(head.logits), sink=head.sink is not None)
    A_masked = theory.renormalise(plus.A, head.keep, plus.sink_mass)
    own = theory.split_own(A_masked, plus.A, head.A, head.keep)
    conditional = theory.split_conditional(A_masked, head.A, head.keep, head.sink_mass)
    assert_close(own.total, A_masked - head.A, rtol=1e-10, atol=1e-14)
    assert_close(conditional.total, A_masked - head.A, rtol=1e-10, atol=1e-14)
    assert_close(own.removal, conditional.removal, rtol=0, atol=0)
    R = theory.retained(head.A, head.keep, head.sink_mass)
    assert_close(conditional.arithmetic, head.A * head.keep * (1 / R - 1), rtol=1e-10, atol=1e-14)
    assert_close(conditional.shares, A_masked - head.A * head.keep / R, rtol=1e-10, atol=1e-14)


@with_and_without_sink
def test_law_3_corrected_attention_is_the_runs_own_row_on_survivors(sink):
    plus = random_heads(4, 50, sink=sink)
    A_masked = theory.renormalise(plus.A, plus.keep, plus.sink_mass)
    corrected = theory.correct(A_masked, theory.retained(plus.A, plus.keep, plus.sink_mass))
    assert_close(corrected, plus.A * plus.keep, rtol=1e-12, atol=0)


@with_and_without_sink
def test_law_3_at_the_first_masked_layer_nothing_but_arithmetic_and_removal(sink):
    head = random_heads(5, 50, sink=sink)
    A_masked = theory.renormalise(head.A, head.keep, head.sink_mass)
    own = theory.split_own(A_masked, head.A, head.A, head.keep)
    conditional = theory.split_conditional(A_masked, head.A, head.keep, head.sink_mass)
    assert bool((own.mechanism == 0).all()) and bool((conditional.shares == 0).all())
    assert_close(own.arithmetic, conditional.arithmetic, rtol=1e-10, atol=1e-14)
    assert_close(theory.conditional(head.A, head.keep, head.sink_mass), A_masked, rtol=0, atol=0)


@with_and_without_sink
def test_law_3_without_a_mask_everything_coincides(sink):
    head = random_heads(6, 50, sink=sink)
    everything = torch.ones_like(head.keep)
    R = theory.retained(head.A, everything, head.sink_mass)
    A_masked = theory.renormalise(head.A, everything, head.sink_mass)
    assert_close(R, torch.ones_like(R), rtol=1e-14, atol=0)
    for row in (A_masked, theory.correct(A_masked, R), theory.conditional(head.A, everything, head.sink_mass)):
        assert_close(row, head.A, rtol=1e-14, atol=0)
    for split in (
        theory.split_own(head.A, head.A, head.A, everything),
        theory.split_conditional(head.A, head.A, everything, head.sink_mass),
    ):
        assert_close(split.total, torch.zeros_like(head.A), rtol=0, atol=1e-15)


def test_law_3_a_leaking_mask_is_refused():
    A, keep = torch.tensor([0.5, 0.5]), torch.tensor([True, False])
    with pytest.raises(TheoryError, match=r"weight 0\.5 on an evicted key"):
        theory.split_own(A, A, A, keep)


@both_norms
@law
@given(head=heads())
def test_law_4_perturbation_is_the_difference_of_outputs(p, head):
    before, after = (slow_output(slow_row(head, dead), head) for dead in ((), evicted(head)))
    difference = [b - a for a, b in zip(before, after, strict=True)]
    vector = theory.perturbation_vector(head.A, head.V, head.W_O, head.keep, head.sink_mass)
    L = theory.perturbation(head.A, head.V, head.W_O, head.keep, p, head.sink_mass)
    noise = 1e-13 * (slow_norm(before, p) + slow_norm(after, p) + float(head.V.abs().max() * head.W_O.abs().sum()))
    assert_close(vector, f64(difference), rtol=1e-9, atol=noise)
    assert_close(L, f64(slow_norm(difference, p)), rtol=1e-9, atol=noise * len(difference))


@law
@given(heads(), st.data())
def test_law_4_single_key(head, data):
    i = data.draw(st.integers(0, len(head.logits) - 1))
    keep = torch.arange(len(head.logits)) != i
    a, R = head.A[i], theory.retained(head.A, keep, head.sink_mass)
    o, value = head.A @ head.V @ head.W_O, head.V[i] @ head.W_O
    vector = theory.perturbation_vector(head.A, head.V, head.W_O, keep, head.sink_mass)
    atol = 1e-13 * float(a / R * head.V.abs().max() * head.W_O.abs().sum())
    assert_close(vector, a / R * (o - value), rtol=1e-9, atol=atol)


@both_norms
@pytest.mark.parametrize("R", [1e-3, 1e-6, 1e-9, 1e-12])
def test_law_4_does_not_cancel_in_float32(p, R):
    g = torch.Generator().manual_seed(0)
    A = torch.rand(64, 100, generator=g).double()
    keep = torch.arange(100) % 3 > 0
    A = torch.where(keep, A * R / (A * keep).sum(-1, keepdim=True), A * (1 - R) / (A * ~keep).sum(-1, keepdim=True))
    A, V, W_O = A.float(), torch.randn(64, 100, 16, generator=g), torch.randn(16, 32, generator=g)
    exact = theory.perturbation(A.double(), V.double(), W_O.double(), keep, p)
    assert_close(theory.perturbation(A, V, W_O, keep, p).double(), exact, rtol=5e-7, atol=0)


def test_law_4_the_equivalent_form_does_cancel():
    """(a_S z − u_S) / R: the reason for the form that is used."""
    head = random_heads(7, 200, n=50, d=16, D=32)
    keep = torch.arange(50) > 0
    logits = head.logits.clone()
    logits[:, 0] = logits[:, 1:].logsumexp(-1) + math.log(1e6)
    A, V, W_O = theory.attention(logits)[0].float(), head.V.float(), head.W_O.float()
    a_S, R = theory.retained(A, ~keep), theory.retained(A, keep)
    z, u_S = (torch.einsum("bn,bnd->bd", row, V) for row in (A, A * ~keep))
    cancelling = torch.einsum("bd,bdD->bD", (a_S[:, None] * z - u_S) / R[:, None], W_O).abs().sum(-1)
    exact = theory.perturbation(A.double(), V.double(), W_O.double(), keep)
    assert (cancelling / exact - 1).abs().max() > 0.01
    assert (theory.perturbation(A, V, W_O, keep) / exact - 1).abs().max() < 1e-5


@with_and_without_sink
def test_law_4_adding_one_vector_to_all_values_changes_nothing_unless_a_sink_is_learned(sink):
    head = random_heads(8, 200, sink=sink)
    moved = head.V + torch.linspace(-3, 5, head.V.shape[-1], dtype=torch.float64)
    for measure in (theory.perturbation, theory.centred_bound):
        before, after = (measure(head.A, V, head.W_O, head.keep, 1, head.sink_mass) for V in (head.V, moved))
        change = (after / before - 1).abs()
        assert change.max() > 0.01 if sink else change.max() < 1e-10


@both_norms
def test_law_4_value_norms_by_the_gram_matrix(p):
    head = random_heads(9, 30, n=100)
    slow = torch.linalg.vector_norm(head.V @ head.W_O, p, -1)
    assert_close(theory.value_norms(head.V, head.W_O, p), slow, rtol=1e-9, atol=0)
    assert_close(theory.gram(head.W_O), torch.einsum("bde,bfe->bdf", head.W_O, head.W_O), rtol=1e-12, atol=1e-12)
    assert_close(theory.value_norms(head.V.float(), head.W_O.float(), p).double(), slow, rtol=1e-5, atol=0)


def test_law_4_gram_negatives_from_rounding_are_clamped():
    W_O = random_heads(10, 50, D=2, d=6).W_O
    kernel = torch.linalg.svd(W_O.mT).Vh[:, 2:]
    assert bool((theory.value_norms(1e3 * kernel, W_O, 2) < 1e-4).all())
    quadratic = ((kernel @ theory.gram(W_O)) * kernel).sum(-1)
    assert bool((quadratic < 0).any()), "the example must need the clamp"


def test_memory_projected_values_are_never_whole():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            if isinstance(out, torch.Tensor):
                self.elements = max(self.elements, out.numel())
            return out

    V, W_O = torch.randn(20_000, 8), torch.randn(8, 1024)
    with Largest() as largest:
        m = theory.value_norms(V, W_O)
    assert largest.elements <= max(V.numel(), torch.get_num_threads() * 2**19)
    assert_close(m[::997], (V[::997] @ W_O).abs().sum(-1))

"""Every public function of kvprobe.theory with 16-bit input: right to fp32, or refused in one line."""

import inspect

import pytest
import torch
from torch.testing import assert_close

from kvprobe import theory
from kvprobe.errors import TheoryError

LOW = [torch.bfloat16, torch.float16]
both = pytest.mark.parametrize("dtype", LOW, ids=["bf16", "fp16"])
N, D, WIDTH = 40, 8, 24


def scene(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, N, generator=g).double() * 2
    keep = torch.rand(6, N, generator=g) > 0.4
    values = torch.randn(2, N, D, generator=g).to(dtype)
    w_o = torch.randn(6, D, WIDTH, generator=g).to(dtype)
    return logits.softmax(-1), keep, values, w_o


def calls(A, keep, V, W, m):
    """Name → the call, on rows A [6, n] with values V [2, n, d]."""
    per_head = theory.per_query_head(V, 6)
    after = theory.renormalise(A.double(), keep).to(A.dtype)
    R = theory.retained(A.double(), keep).to(A.dtype)
    first = keep & (torch.arange(N) % 5 > 0)
    stage1 = first if bool((A.double() * first).sum(-1).min() > 0) else keep
    return {
        "attention": lambda: theory.attention(A.log())[0],
        "bound": lambda: theory.bound(A, m, keep),
        "centred_bound": lambda: theory.centred_bound(A, per_head, W, keep),
        "conditional": lambda: theory.conditional(A, keep),
        "consequences": lambda: theory.consequences(A, V, W, keep[None]).bound,
        "correct": lambda: theory.correct(after, R),
        "fractional_bound": lambda: theory.fractional_bound(A, after, m),
        "layer_bound": lambda: theory.layer_bound(A, m, keep),
        "layer_perturbation": lambda: theory.layer_perturbation(A, V, W, keep),
        "perturbation": lambda: theory.perturbation(A, per_head, W, keep),
        "perturbation_vector": lambda: theory.perturbation_vector(A, per_head, W, keep),
        "relaxed_bound": lambda: theory.relaxed_bound(A, m, stage1, keep),
        "renormalise": lambda: theory.renormalise(A, keep),
        "renormalise_soft": lambda: theory.renormalise_soft(A, keep.to(A.dtype)),
        "retained": lambda: theory.retained(A, keep),
        "split_conditional": lambda: theory.split_conditional(after * keep, A, keep).total,
        "split_own": lambda: theory.split_own(after * keep, A, A, keep).total,
        "stage2_bound": lambda: theory.stage2_bound(A, m, stage1, keep),
        "value_gate": lambda: theory.value_gate(A, per_head, W, keep, 0.5),
        "value_gate_vector": lambda: theory.value_gate_vector(A, per_head, W, keep, 0.5),
        "value_mass": lambda: theory.value_mass(A, m, keep),
    }


WITHOUT_ROWS = {"gram", "kappa", "kappa_inverse", "per_query_head", "projected_norms", "value_norms"}
A64, KEEP, V64, W64 = scene()
M64 = theory.value_norms(theory.per_query_head(V64, 6), W64)


def test_the_table_names_every_public_function():
    functions = {name for name in theory.__all__ if inspect.isfunction(getattr(theory, name))}
    assert {*calls(A64, KEEP, V64, W64, M64)} | WITHOUT_ROWS == functions


@both
@pytest.mark.parametrize("name", sorted(calls(A64, KEEP, V64, W64, M64)))
def test_rows_of_16_bits_are_refused(name, dtype):
    with pytest.raises(TheoryError, match=f"{dtype!s}.*allowed") as caught:
        calls(A64.to(dtype), KEEP, V64, W64, M64.float())[name]()
    assert "\n" not in str(caught.value)


@both
@pytest.mark.parametrize("name", sorted(calls(A64, KEEP, V64, W64, M64)))
def test_values_and_projections_of_16_bits_are_summed_in_the_dtype_of_the_rows(name, dtype):
    _, _, values, w_o = scene(dtype)
    m = theory.value_norms(theory.per_query_head(values, 6), w_o)
    assert m.dtype == torch.float32
    mine = calls(A64.float(), KEEP, values, w_o, m)[name]()
    exact = theory.value_norms(theory.per_query_head(values.double(), 6), w_o.double())
    truth = calls(A64, KEEP, values.double(), w_o.double(), exact)[name]()
    assert mine.dtype in (torch.float32, torch.float64)
    size = float(truth.nan_to_num().abs().max())
    assert size > 0
    assert_close(mine.double(), truth, rtol=2e-5, atol=2e-6 * size, equal_nan=True)  # NaN: θ̂ where σ is at most 1/2


@both
@pytest.mark.parametrize("p", [1, 2])
def test_norms(dtype, p):
    """‖V W_O‖ of fp16 values whose products are beyond fp16, and of values far below its smallest number."""
    _, _, values, w_o = scene(dtype)
    for scale in (1.0, 2.0**9, 2.0**-9):
        V, W = (values * scale)[0], w_o[0] * scale
        truth = (V.double() @ W.double()).norm(p=p, dim=-1)
        norms = theory.value_norms(V, W, p)
        assert norms.dtype == torch.float32
        assert_close(norms.double(), truth, rtol=1e-5, atol=0)
        assert_close(theory.projected_norms(V.float(), W, p).double(), truth, rtol=1e-5, atol=0)
        # Asked for in 16 bits, the result has 16 bits: only the result is rounded, where it can be told at all.
        low = theory.projected_norms(V, W, p)
        assert low.dtype == dtype
        known = (truth < torch.finfo(dtype).max) & (truth > torch.finfo(dtype).tiny)
        assert_close(low.double()[known], truth[known], rtol=2 * torch.finfo(dtype).eps, atol=0)


@both
def test_gram(dtype):
    _, _, _, w_o = scene(dtype)
    for scale in (1.0, 2.0**8):
        W = w_o * scale
        truth = W.double() @ W.double().mT
        assert_close(theory.gram(W).double(), truth, rtol=1e-5, atol=1e-5 * float(truth.abs().max()))


@both
def test_doses(dtype):
    share, mass = torch.tensor([0.25, 0.5, 0.75]).to(dtype), torch.tensor(0.125).to(dtype)
    truth = theory.kappa_inverse(share.double(), mass.double())
    beta = theory.kappa_inverse(share, mass)
    assert beta.dtype in (torch.float32, torch.float64)
    assert_close(beta.double(), truth, rtol=1e-6, atol=0)
    assert_close(theory.kappa(beta, mass).double(), share.double(), rtol=1e-6, atol=0)
    with pytest.raises(TheoryError):
        theory.kappa(-share, mass)


@both
def test_values_as_each_query_head_reads_them_keep_their_dtype(dtype):
    _, _, values, _ = scene(dtype)
    wide = theory.per_query_head(values, 6)
    assert wide.dtype == dtype and all(torch.equal(wide[h], values[h // 3]) for h in range(6))

"""projected_norm against float64 loops, on every backend."""

from itertools import product

import pytest
import torch

from kvprobe_kernels import projected_norm

EPS = torch.finfo(torch.float32).eps


def oracle(V, W_O, p, group, centre=None):
    """Row by row, head by head, in float64."""
    H, K, n = W_O.shape[0], V.shape[-3], V.shape[-2]
    out = torch.empty(*V.shape[:-3], H, n, dtype=torch.float64)
    for index in product(*map(range, out.shape)):
        *b, h, i = index
        y = V[(*b, h // (H // K), i)].double() @ W_O[h].double()
        if centre is not None:
            y = y - centre[(*b, h)].double()
        out[index] = y.abs().sum() if p == 1 else y.square().sum().sqrt()
    return out if group == "none" else out.unflatten(-2, (K, H // K)).mean(-2)


def scale(V, W_O, p, centre=None):
    """Rounding of one product is a few eps of ‖x‖ ‖W‖ (√D more in the 1-norm), plus the centre's own size."""
    wide = W_O.shape[-1] ** (0.5 if p == 1 else 0)
    size = V.double().norm(dim=-1).max() * W_O.double().flatten(1).norm(dim=-1).max()
    size = size + (0 if centre is None else centre.double().norm(dim=-1).max())
    return float(size * wide)


def draw(shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found, wanted, slack):
    assert found.shape == wanted.shape
    worst = float((found.double() - wanted).abs().max())
    assert worst <= slack, f"off by {worst:.3g}, allowed {slack:.3g}"


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    ("n", "d", "D"), [(1, 1, 1), (7, 8, 255), (123, 64, 33), (255, 8, 33), (507, 8, 1), (7, 80, 576), (1, 64, 576)]
)
def test_awkward_sizes(backend, n, d, D, centred, p):
    V, W_O = draw((3, n, d)), draw((9, d, D), 1)
    centre = draw((9, D), 2) if centred else None
    for group in ("mean", "none"):
        found = projected_norm(V, W_O, p, group, centre=centre, backend=backend)
        assert found.dtype == torch.float32
        close(found, oracle(V, W_O, p, group, centre), 4 * EPS * scale(V, W_O, p, centre))


@pytest.mark.parametrize(("H", "K"), [(4, 4), (6, 2), (5, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("p", [1, 2])
def test_heads_and_batches(backend, p, batch, H, K):
    V, W_O, centre = draw((*batch, K, 19, 8)), draw((H, 8, 33), 1), draw((*batch, H, 33), 2)
    for group, c in product(("mean", "none"), (None, centre)):
        found = projected_norm(V, W_O, p, group, centre=c, backend=backend)
        close(found, oracle(V, W_O, p, group, c), 4 * EPS * scale(V, W_O, p, c))


@pytest.mark.parametrize("p", [1, 2])
def test_low_precision_products_that_the_process_allows_are_not_used(backend, p):
    V, W_O = draw((1, 130, 64)), draw((1, 64, 130), 1)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = projected_norm(V, W_O, p, backend=backend)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    close(found, oracle(V, W_O, p, "mean"), 4 * EPS * scale(V, W_O, p))


@pytest.mark.parametrize("p", [1, 2])
def test_batch_is_one_by_one(backend, p):
    V, W_O = draw((4, 2, 19, 8)), draw((6, 8, 33), 1)
    together = projected_norm(V, W_O, p, backend=backend)
    torch.testing.assert_close(
        together, torch.stack([projected_norm(v, W_O, p, backend=backend) for v in V]), rtol=0, atol=0
    )


@pytest.mark.parametrize("p", [1, 2])
def test_permuted_query_heads_permute_results(backend, p):
    V, W_O = draw((2, 19, 8)), draw((6, 8, 33), 1)
    order = [2, 0, 1, 3, 5, 4]
    plain = projected_norm(V, W_O, p, "none", backend=backend)
    assert torch.equal(projected_norm(V, W_O[order], p, "none", backend=backend), plain[order])


@pytest.mark.parametrize("p", [1, 2])
def test_strided_views(backend, p):
    """W_O as a model stores it, and values as a projection leaves them, [*B, n, K, d]."""
    weight, V = draw((33, 6 * 8), 1), draw((2, 19, 3, 8)).transpose(1, 2)
    views = (weight.T.view(6, 8, 33), weight.view(33, 6, 8).permute(1, 2, 0), draw((12, 16, 66), 1)[::2, ::2, ::2])
    for W_O in views:
        found = projected_norm(V, W_O, p, backend=backend)
        assert not W_O.is_contiguous()
        close(found, oracle(V, W_O, p, "mean"), 4 * EPS * scale(V, W_O, p))
        torch.testing.assert_close(found, projected_norm(V.contiguous(), W_O.contiguous(), p, backend=backend))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [1, 2])
def test_sixteen_bit_inputs_stay_within_the_naive_error(backend, p, dtype):
    """The budget is what the plain line loses in that dtype; float32 accumulation must lose a tenth at most."""
    V, W_O, centre = draw((2, 61, 64), 0, dtype), draw((4, 64, 255), 1, dtype), draw((4, 255), 2, dtype)
    for c in (None, centre):
        truth = oracle(V, W_O, p, "none", c)
        offset = 0 if c is None else c[:, None]
        naive = (V.repeat_interleave(2, 0) @ W_O - offset).norm(p=p, dim=-1)
        budget = float((naive.double() - truth).abs().max())
        found = projected_norm(V, W_O, p, "none", centre=c, backend=backend)
        assert found.dtype == torch.float32
        close(found, truth, budget / 10)


@pytest.mark.parametrize("p", [1, 2])
def test_mixed_dtypes(backend, p):
    V, W_O, centre = draw((2, 19, 8), 0, torch.bfloat16), draw((4, 8, 33), 1), draw((4, 33), 2, torch.float16)
    found = projected_norm(V, W_O, p, "none", centre=centre, backend=backend)
    close(found, oracle(V, W_O, p, "none", centre), 4 * EPS * scale(V, W_O, p, centre))


def test_float64_stays_float64(backend):
    V, W_O = draw((2, 19, 8)).double(), draw((4, 8, 33), 1).double()
    for p in (1, 2):
        found = projected_norm(V, W_O, p, backend=backend)
        assert found.dtype == (torch.float32 if backend == "triton" else torch.float64)
        unit = EPS if backend == "triton" else torch.finfo(torch.float64).eps
        close(found, oracle(V, W_O, p, "mean"), 8 * unit * scale(V, W_O, p))


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("n", [1, 7, 123, 130])
def test_rows_outside_are_neither_read_nor_left_unwritten(backend, n, p, monkeypatch):
    """V and W_O are cut out of NaN, and fresh memory is NaN."""
    for name in ("empty", "new_empty", "empty_like"):
        owner = torch.Tensor if name == "new_empty" else torch
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, plain=plain, **k: _poison(plain(*a, **k)))
    V = torch.full((2, n + 64, 16), torch.nan)
    W_O = torch.full((4, 8 + 16, 33 + 64), torch.nan)
    V[:, :n, :8], W_O[:, :8, :33] = draw((2, n, 8)), draw((4, 8, 33), 1)
    V, W_O = V[:, :n, :8], W_O[:, :8, :33]
    for group in ("mean", "none"):
        found = projected_norm(V, W_O, p, group, backend=backend)
        close(found, oracle(V, W_O, p, group), 4 * EPS * scale(V, W_O, p))


def _poison(tensor):
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


def test_a_nan_stays_in_its_row(backend):
    V, W_O = draw((2, 19, 8)), draw((4, 8, 33), 1)
    V[1, 5, 3] = torch.nan
    for p in (1, 2):
        found = projected_norm(V, W_O, p, backend=backend)
        assert found.isnan().nonzero().tolist() == [[1, 5]]


@pytest.mark.parametrize("rank", [0, 1, 5])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("D", [33, 4])
def test_two_norm_of_a_singular_projection(backend, D, centred, rank):
    """Rank deficient, zero, and narrower than the head (D < d)."""
    W_O = draw((4, 8, rank), 1) @ draw((4, rank, D), 2)
    V, centre = draw((2, 19, 8)), draw((4, D), 3) if centred else None
    found = projected_norm(V, W_O, 2, "none", centre=centre, backend=backend)
    close(found, oracle(V, W_O, 2, "none", centre), 4 * EPS * scale(V, W_O, 2, centre))


def test_two_norm_keeps_float32_accuracy_where_the_quadratic_form_does_not(backend):
    """Condition number 1e5 and rows in the weakest direction: √(x G xᵀ) in float32 is wrong in the first digit."""
    left = torch.linalg.qr(draw((8, 8), 1).double()).Q
    right = torch.linalg.qr(draw((33, 8), 2).double()).Q.mT
    W = (left * torch.logspace(0, -5, 8, dtype=torch.float64)) @ right
    V, W_O = (1e3 * left.mT[None, -1:]).float(), W[None].float()
    truth = oracle(V, W_O, 2, "none")
    found = projected_norm(V, W_O, 2, "none", backend=backend)
    # The rounding of the product itself, eps ‖x‖ ‖W‖, which the float32 loop loses as well.
    close(found, truth, 2 * EPS * 1e3)
    quadratic = (V @ (W_O @ W_O.mT) @ V.mT).diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    assert float((quadratic - truth).abs().max()) > 0.1 * float(truth.max())


def test_centre_on_the_point_gives_zero(backend):
    V, W_O = draw((1, 3, 8)), draw((1, 8, 33), 1)
    centre = (V[0, 1].double() @ W_O[0].double()).float()[None]
    for p in (1, 2):
        found = projected_norm(V, W_O, p, centre=centre, backend=backend)[0]
        assert float(found[1]) <= 4 * EPS * scale(V, W_O, p, centre)
        assert float(found[[0, 2]].min()) > 1


def test_zero_centre_is_no_centre(backend):
    V, W_O = draw((2, 19, 8)), draw((4, 8, 33), 1)
    for p in (1, 2):
        zero = projected_norm(V, W_O, p, centre=torch.zeros(4, 33), backend=backend)
        close(zero, projected_norm(V, W_O, p, backend=backend).double(), 4 * EPS * scale(V, W_O, p))


@pytest.mark.parametrize("shape", [(2, 0, 8), (3, 2, 0, 8), (0, 2, 5, 8)])
def test_nothing_in_nothing_out(backend, shape):
    for group, heads in (("mean", 2), ("none", 4)):
        found = projected_norm(torch.zeros(shape), torch.zeros(4, 8, 33), 2, group, backend=backend)
        assert found.shape == (*shape[:-3], heads, shape[-2])
        assert found.dtype == torch.float32


def test_parameters_carry_no_gradient(backend):
    V, W_O = draw((2, 19, 8)).requires_grad_(), torch.nn.Parameter(draw((4, 8, 33), 1))
    for p in (1, 2):
        assert not projected_norm(V, W_O, p, backend=backend).requires_grad

"""Two-stage selection: against sorting Python numbers, and the laws it obeys, on every backend."""

import math
import os
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprobe_kernels import KernelError, two_stage_select

INF = math.inf
EPS = 2.0**-10  # exact in fp32, and so are all sums and products of the grids below
# The interpreter takes about a hundred times as long.
EXAMPLES = 12 if os.environ.get("TRITON_INTERPRET") else 150
laws = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def sorted_row(score, norm, b, alpha="0.5", eps=EPS, protected=(), least=0):
    """The set of kept positions, from the definition."""

    def best(places, among, key):
        return set(sorted(among, key=lambda i: (-key(i), i))[:places])

    alive = {i for i, s in enumerate(score) if s > -INF}
    if norm is None:
        return set(protected) | best(b - len(protected), alive - set(protected), lambda i: score[i])
    whole, part = divmod(Fraction(alpha) * b, 1)
    assert part < 1
    first = max(len(protected), int(whole), min(least, b))
    kept = set(protected) | best(first - len(protected), alive - set(protected), lambda i: score[i])
    return kept | best(b - first, alive - kept, lambda i: (score[i] + eps) * norm[i])


def positions(keep):
    return [set(row.nonzero()[:, 0].tolist()) for row in keep]


@st.composite
def problems(draw):
    """Rows on coarse grids, so that most cuts fall among ties; ragged budgets; protected and dead entries."""
    rows, n = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    grid = st.lists(st.sampled_from([-INF, -0.5, -0.0, 0.0, 0.25, 0.5, 2.0]), min_size=n, max_size=n)
    scores = draw(st.lists(grid, min_size=rows, max_size=rows))
    weights = st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.5]), min_size=n, max_size=n)
    norms = draw(st.none() | st.lists(weights, min_size=rows, max_size=rows))
    marked, budgets, least = [], [], []
    for row in scores:
        alive = [i for i, s in enumerate(row) if s > -INF]
        marked.append(set(draw(st.lists(st.sampled_from(alive), max_size=4))) if alive else set())
        budgets.append(draw(st.integers(len(marked[-1]), len(alive))))
        least.append(draw(st.integers(0, n)))
    alpha = draw(st.sampled_from(["0", "0.25", "0.3", "0.5", "0.7", "1"]))
    return scores, norms, marked, budgets, least, alpha


def mask(sets, n):
    return torch.tensor([[i in row for i in range(n)] for row in sets])


@laws
@given(problem=problems())
def test_equals_sorting(backend, problem):
    scores, norms, marked, budgets, least, alpha = problem
    keep = two_stage_select(
        torch.tensor(scores), None if norms is None else torch.tensor(norms), torch.tensor(budgets), float(alpha), EPS,
        mask(marked, len(scores[0])), at_least=torch.tensor(least), backend=backend,
    )  # fmt: skip
    rows = zip(scores, norms or [None] * len(scores), budgets, marked, least, strict=True)
    assert positions(keep) == [sorted_row(s, m, b, alpha, EPS, p, a) for s, m, b, p, a in rows]
    assert keep.sum(-1).tolist() == budgets


def rough(rows, n, seed=0):
    """Scores and norms over many magnitudes, whose sums and products round."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, n, generator=generator).mul(4).exp() / n
    return scores, torch.randn(rows, n, generator=generator).exp()


@pytest.mark.parametrize("n", [1, 255, 1024, 1025, 2500])
def test_the_same_set_to_the_bit_where_products_round(backend, n):
    scores, norms = rough(2, n)
    scores[1] = (scores[1] * n * 4).round() / (n * 4)
    budgets = torch.tensor([max(1, n // 5), n // 2])
    keep = two_stage_select(scores, norms, budgets, 0.3, backend=backend)
    products = (scores + 1e-4) * norms
    for row, b in enumerate(budgets.tolist()):
        order = sorted(range(n), key=lambda i: (-scores[row, i].item(), i))
        first = b * 3 // 10
        rest = sorted(order[first:], key=lambda i: (-products[row, i].item(), i))
        assert positions(keep)[row] == set(order[:first] + rest[: b - first])


def test_ties_go_to_the_lower_position_across_blocks(backend):
    n, b = 2100, 1400
    keep = two_stage_select(torch.full((1, n), 0.5), torch.ones(1, n), b, backend=backend)
    assert keep[0].tolist() == [True] * b + [False] * (n - b)
    zeros = torch.tensor([[0.0, -0.0] * 5])
    assert positions(two_stage_select(zeros, None, 5, backend=backend)) == [{0, 1, 2, 3, 4}]
    norms = torch.tensor([[0.0, -0.0] * 5])
    assert positions(two_stage_select(zeros, norms, 6, 0.0, backend=backend)) == [{0, 1, 2, 3, 4, 5}]


def test_without_epsilon_zero_scores_leave_position_order(backend):
    scores, norms = torch.zeros(1, 9), torch.arange(9.0)[None]
    assert positions(two_stage_select(scores, norms, 4, epsilon=0, backend=backend)) == [{0, 1, 2, 3}]
    # With it, stage 1 takes the first two, and stage 2 the largest norms.
    assert positions(two_stage_select(scores, norms, 4, backend=backend)) == [{0, 1, 7, 8}]


def test_attention_only_in_its_three_forms(backend):
    scores = torch.randint(0, 6, (3, 40), generator=torch.Generator().manual_seed(1)) / 8
    norms = rough(3, 40)[1]
    budgets = torch.tensor([4, 11, 39])
    plain = two_stage_select(scores, None, budgets, backend=backend)
    assert positions(plain) == [sorted_row(s, None, b) for s, b in zip(scores.tolist(), budgets.tolist(), strict=True)]
    assert torch.equal(plain, two_stage_select(scores, norms, budgets, 1, backend=backend))
    assert torch.equal(
        plain, two_stage_select(scores, torch.full_like(norms, 4.0), budgets, epsilon=EPS, backend=backend)
    )
    assert not torch.equal(plain, two_stage_select(scores, norms, budgets, backend=backend))


def test_a_larger_budget_keeps_what_a_smaller_kept(backend):
    scores, norms = rough(1, 9)
    norms[:, 4:] = norms[:, 4:].round()
    before = torch.zeros(1, 9, dtype=torch.bool)
    for b in range(10):
        keep = two_stage_select(scores, norms, b, backend=backend)
        assert int(keep.sum()) == b and bool((keep | ~before).all())
        before = keep
    assert bool(before.all())


def test_permuting_positions_permutes_the_choice(backend):
    scores, norms = rough(2, 60)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(2))
    protected = torch.arange(60) % 17 == 0
    keep = two_stage_select(scores, norms, 21, protected=protected, backend=backend)
    permuted = two_stage_select(scores[:, order], norms[:, order], 21, protected=protected[order], backend=backend)
    assert torch.equal(keep[:, order], permuted)


def test_batch_is_one_by_one(backend):
    scores, norms = (x.view(2, 1, 2, 20) for x in rough(4, 20))
    budgets = torch.arange(4).view(2, 1, 2) * 2 + 9
    protected = torch.rand(2, 1, 2, 20, generator=torch.Generator().manual_seed(3)) < 0.1
    keep = two_stage_select(scores, norms, budgets, protected=protected, at_least=budgets - 2, backend=backend)
    assert keep.shape == scores.shape and keep.dtype == torch.bool
    for i in range(2):
        for k in range(2):
            here, b = (i, 0, slice(k, k + 1)), int(budgets[i, 0, k])
            alone = two_stage_select(
                scores[here], norms[here], b, protected=protected[here], at_least=b - 2, backend=backend
            )
            assert torch.equal(keep[here], alone)


def test_budgets_and_protection_of_one_batch_hold_for_all(backend):
    scores, norms = (x.view(2, 3, 20) for x in rough(6, 20))
    protected = torch.zeros(3, 20, dtype=torch.bool)
    protected[1, -4:] = True
    budgets = torch.tensor([3, 7, 0])
    keep = two_stage_select(scores, norms, budgets, protected=protected, backend=backend)
    wide = two_stage_select(scores, norms, budgets.expand(2, 3), protected=protected.expand(2, 3, 20), backend=backend)
    assert torch.equal(keep, wide) and bool(keep[:, 1, -4:].all()) and keep.sum(-1).tolist() == [[3, 7, 0]] * 2
    last = torch.arange(20) >= 18
    everywhere = two_stage_select(scores, norms, 5, protected=last, backend=backend)
    assert bool(everywhere[..., 18:].all()) and bool((everywhere.sum(-1) == 5).all())


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.9])
def test_stage_two_is_top_k_of_the_product_around_a_protected_stage_one(backend, alpha):
    scores, norms = rough(2, 50)
    scores[:, 30:] = scores[:, :1]
    protected, b = torch.arange(50) >= 46, 18
    first = max(4, int(Fraction(str(alpha)) * b))
    stage_one = two_stage_select(scores, None, first, protected=protected, backend=backend)
    composed = two_stage_select((scores + 1e-4) * norms, None, b, protected=stage_one, backend=backend)
    assert torch.equal(composed, two_stage_select(scores, norms, b, alpha, protected=protected, backend=backend))


def test_protected_entries_use_stage_one_places_first(backend):
    # Four places in stage 1, three of them protected: one best score, then the largest norms.
    scores, norms = torch.arange(10.0, 0, -1)[None] / 16, torch.tensor([[0.0] * 5 + [1.0, 8.0, 9.0, 9.0, 9.0]])
    protected = torch.arange(10) >= 7
    keep = two_stage_select(scores, norms, 8, protected=protected, backend=backend)
    assert positions(keep) == [{7, 8, 9, 0, 6, 5, 1, 2}]
    keep = two_stage_select(scores, norms, 6, protected=protected, backend=backend)
    assert positions(keep) == [{7, 8, 9, 6, 5, 0}]


def ramps(n):
    """Scores that fall and norms that rise steeply: stage 1 keeps a head, stage 2 a tail."""
    return torch.linspace(1, 0.5, n)[None], torch.arange(n)[None].float() ** 2


@pytest.mark.parametrize(
    ("alpha", "b", "first"),
    [(0.5, 10, 5), (0.5, 11, 5), (0.7, 10, 7), (0.3, 10, 3), (0.29, 100, 29), (0.57, 100, 57), (0.1, 30, 3), (1, 9, 9)],
)
def test_the_floor_is_exact(backend, alpha, b, first):
    keep = two_stage_select(*ramps(300), b, alpha, backend=backend)
    assert positions(keep) == [set(range(first)) | set(range(300 - b + first, 300))]


@pytest.mark.parametrize(("least", "first"), [(0, 5), (5, 5), (8, 8), (10, 10), (99, 10)])
def test_at_least_raises_stage_one_up_to_the_budget(backend, least, first):
    keep = two_stage_select(*ramps(40), 10, at_least=least, backend=backend)
    assert positions(keep) == [set(range(first)) | set(range(30 + first, 40))]


def test_dead_entries_are_never_kept(backend):
    scores, norms = rough(3, 30)
    dead = torch.rand(3, 30, generator=torch.Generator().manual_seed(4)) < 0.5
    scores[dead] = -INF
    norms[:, ::3] = 0.0
    keep = two_stage_select(scores, norms, (~dead).sum(-1), backend=backend)
    assert torch.equal(keep, ~dead)
    # A candidate of product 0 comes before an entry that is none, wherever they are.
    few = two_stage_select(
        torch.tensor([[-INF, -INF, 0.0, 0.0]]), torch.tensor([[9.0, 0.0, 0.0, 0.0]]), 2, 0, 0, backend=backend
    )
    assert positions(few) == [{2, 3}]


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_extreme_products_are_still_ordered(backend):
    # Both products of 1e30 overflow and tie; 2^-140 and 2^-141 are subnormal; the last entries overflow downwards.
    scores = torch.tensor([[1e30, 1e30, 2.0**-100, 2.0**-100, 0.0, -INF, -1e30, -1e30]])
    norms = torch.tensor([[1e10, 1e20, 2.0**-41, 2.0**-40, 1.0, 1.0, 1e20, 1e10]])
    nested = [{0}, {0, 1}, {0, 1, 3}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 6}, {0, 1, 2, 3, 4, 6, 7}]
    for b, kept in enumerate(nested, 1):
        assert positions(two_stage_select(scores, norms, b, 0, 0, backend=backend)) == [kept]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_compared_in_fp32(backend, dtype):
    scores, norms = (x.to(dtype) for x in rough(2, 80))
    keep = two_stage_select(scores, norms, 30, backend=backend)
    assert torch.equal(keep, two_stage_select(scores.float(), norms.float(), 30, backend=backend))


def test_fp64_is_compared_in_fp64_or_refused(backend):
    scores = torch.tensor([[1.0, 1.0 + 2.0**-40, 1.0 + 2.0**-41]], dtype=torch.float64)
    if backend == "triton":
        with pytest.raises(KernelError, match=r"fp32 scores, given float64: backend='torch'"):
            two_stage_select(scores, None, 1, backend=backend)
    else:
        assert positions(two_stage_select(scores, None, 1, backend=backend)) == [{1}]
        assert positions(two_stage_select(scores, torch.ones_like(scores), 2, 0, backend=backend)) == [{1, 2}]


def test_views_are_read_and_nothing_is_written(backend):
    scores, norms = (x.T for x in rough(40, 3))
    protected = (torch.arange(80) % 16 == 0)[::2]
    before = [x.clone() for x in (scores, norms, protected)]
    keep = two_stage_select(scores.requires_grad_(), norms, 12, protected=protected, backend=backend)
    assert all(torch.equal(x, y) for x, y in zip((scores, norms, protected), before, strict=True))
    scores, norms = scores.detach().contiguous(), norms.contiguous()
    assert torch.equal(keep, two_stage_select(scores, norms, 12, protected=protected.clone(), backend=backend))
    assert keep.sum(-1).tolist() == [12] * 3


@pytest.mark.parametrize("shape", [(3, 0), (0, 5), (2, 0, 4)])
def test_nothing_to_choose_from(backend, shape):
    keep = two_stage_select(torch.zeros(shape), torch.zeros(shape), 0, backend=backend)
    assert keep.shape == shape and keep.dtype == torch.bool

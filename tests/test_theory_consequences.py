"""All about many kept sets of a layer: numpy loops over keys, the functions one by one, what must not matter."""

import sys
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_heads import random_heads
from torch.testing import assert_close

from kvprobe import theory
from kvprobe.errors import TheoryError
from kvprobe.theory import norms
from kvprobe.theory.consequences import consequences

law = settings(max_examples=60, deadline=None, derandomize=True)
both_norms = pytest.mark.parametrize("p", [1, 2])
ROUNDING = 1 + 1e-11
MODULE = sys.modules[consequences.__module__]  # the package exports a function of the same name
STAGES = ("sigma", "stage2_bound", "relaxed_bound", "relaxed_candidates")


def layer(seed, *, H=4, K=2, J=4, n=11, d=3, D=6, S=3, sink=False, invisible=False):
    """Arguments of ``consequences``: sets between "keeps one key" and "evicts one key", first stages within them."""
    row = random_heads(seed, H, n=n, d=d, D=D, sink=sink)
    A, sink_mass = row.A, row.sink_mass
    g = torch.Generator().manual_seed(seed + 1)
    keep = torch.rand(S, J, n, generator=g) < torch.rand(S, 1, 1, generator=g)
    top = A.max(0).values.argmax()
    keep[..., 0] = keep[..., top] = True
    # half of the first stages hold most of what is kept, so that σ ≤ ½ and σ > ½ both occur
    stage1 = keep & (torch.rand(S, J, n, generator=g) < torch.tensor([0.95, 0.3, 0.8])[torch.arange(S) % 3, None, None])
    if invisible:  # as a sliding window leaves it: no attention, whatever the values
        A = A * (torch.arange(n) >= n // 3)
        A = A / (A.sum(-1, keepdim=True) + (0 if sink_mass is None else sink_mass[:, None]))
        sink_mass = None if sink_mass is None else 1 - A.sum(-1)
        keep[..., -1] = True
    return {"A": A, "V": row.V[:K], "W_O": row.W_O, "keep": keep, "stage1": stage1, "sink_mass": sink_mass}


@st.composite
def layers(draw):
    K, G = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (2, 3)]))
    H = K * G
    sizes = {"n": draw(st.integers(2, 13)), "d": draw(st.integers(1, 5)), "D": draw(st.integers(1, 7))}
    kinds = {"sink": draw(st.booleans()), "invisible": draw(st.booleans())}
    J = draw(st.sampled_from(sorted({1, K, H})))
    return layer(draw(st.integers(0, 2**31)), H=H, K=K, J=J, S=draw(st.integers(1, 4)), **sizes, **kinds)


def slow(given, p):
    """All columns by loops over sets, heads and keys, from the definitions: softmax with and without the lost keys."""
    A, V, W = (given[name].numpy() for name in ("A", "V", "W_O"))
    keep, stage1 = given["keep"].numpy(), given["stage1"].numpy()
    H, n = A.shape
    sink = np.zeros(H) if given["sink_mass"] is None else given["sink_mass"].numpy()
    size = (lambda x: np.abs(x).sum()) if p == 1 else (lambda x: np.sqrt((x * x).sum()))
    out = {each.name: [] for each in fields(theory.Consequences)}
    for s in range(len(keep)):
        whole = np.zeros(W.shape[-1])
        line = {name: [] for name in out}
        for h in range(H):
            kept = [bool(keep[s, h * keep.shape[1] // H, i]) for i in range(n)]
            first = [bool(stage1[s, h * keep.shape[1] // H, i]) for i in range(n)]
            projected = [V[h * len(V) // H, i] @ W[h] for i in range(n)]
            m = [size(x) for x in projected]
            lost = [i for i in range(n) if not kept[i]]
            R = sum(A[h, i] for i in range(n) if kept[i]) + sink[h]
            after = [A[h, i] / R if kept[i] else 0.0 for i in range(n)]
            o_after = sum(after[i] * projected[i] for i in range(n))
            a_S = sum(A[h, i] for i in lost)
            # o′ − o without its cancellation: evicted mass × (what remains − mean of what was cut)
            change = sum((A[h, i] * (o_after - projected[i]) for i in lost), np.zeros_like(whole))
            whole = whole + change
            sigma = sum(A[h, i] for i in range(n) if first[i]) + sink[h]
            c = 2 - 1 / sigma if sigma > 0 else np.nan
            C = sum(A[h, i] * m[i] for i in range(n))
            C_prime = C - c * sum(A[h, i] * m[i] for i in range(n) if first[i])
            second = [i for i in range(n) if kept[i] and not first[i]]
            visible = [i for i in range(n) if A[h, i] > 0]
            M = min(m[i] for i in visible)
            others = [m[i] for i in visible if not first[i]]
            valid = sigma > 0.5
            line["mass"].append(a_S)
            line["retained"].append(R)
            line["value_mass"].append(sum(A[h, i] * m[i] for i in lost))
            line["perturbation"].append(size(change))
            line["centred_bound"].append(sum(A[h, i] * size(o_after - projected[i]) for i in lost))
            line["bound"].append(sum(abs(A[h, i] - after[i]) * m[i] for i in range(n)))
            line["sigma"].append(sigma)
            mass2 = sum(A[h, i] for i in second)
            line["stage2_bound"].append(C_prime - c * sum(A[h, i] * m[i] for i in second) if valid else np.nan)
            line["relaxed_bound"].append(C_prime - M * c * mass2 if valid else np.nan)
            least = min(others) if others else 0.0
            line["relaxed_candidates"].append(C_prime - least * c * mass2 if valid else np.nan)
        for name, values in line.items():
            out[name].append(size(whole) if name == "layer_perturbation" else values)
    return {name: torch.tensor(np.array(values, dtype=float)) for name, values in out.items()}


def sharp(sigma):
    """Where rounding cannot carry σ over ½."""
    return (sigma - 0.5).abs() > 1e-9


@both_norms
@law
@given(given=layers())
def test_every_column_is_the_loop_over_keys(p, given):
    found, truth = consequences(**given, p=p), slow(given, p)
    size = float(truth["bound"].max() + (given["V"].abs().sum(-1).max() * given["W_O"].abs().sum()))
    for each in fields(found):
        mine = getattr(found, each.name)
        assert mine.dtype == torch.float64
        assert mine.shape == ((len(given["keep"]),) if each.name == "layer_perturbation" else truth["mass"].shape)
        clear = sharp(truth["sigma"]) if each.name in STAGES[1:] else torch.ones_like(mine, dtype=torch.bool)
        assert_close(
            mine[clear],
            truth[each.name][clear],
            rtol=1e-8,
            atol=1e-13 * size,
            equal_nan=True,
            msg=lambda m, e=each: f"{e.name}: {m}",
        )


@both_norms
@law
@given(given=layers())
def test_it_is_the_other_functions_set_by_set(p, given):
    A, V, W_O, sink = given["A"], given["V"], given["W_O"], given["sink_mass"]
    H, K, J = len(A), len(V), given["keep"].shape[1]
    found = consequences(**given, p=p)
    values = V.repeat_interleave(H // K, 0)
    m = theory.value_norms(values, W_O, p)
    for s in range(len(given["keep"])):
        keep, stage1 = (given[name][s].repeat_interleave(H // J, 0) for name in ("keep", "stage1"))
        one_by_one = {
            "mass": theory.retained(A, ~keep),
            "retained": theory.retained(A, keep, sink),
            "value_mass": theory.value_mass(A, m, keep),
            "perturbation": theory.perturbation(A, values, W_O, keep, p, sink),
            "centred_bound": theory.centred_bound(A, values, W_O, keep, p, sink),
            "bound": theory.bound(A, m, keep, sink),
            "layer_perturbation": theory.layer_perturbation(A, V, W_O, keep, p, sink),
            "sigma": theory.retained(A, stage1, sink),
            "stage2_bound": theory.stage2_bound(A, m, stage1, keep, sink),
            "relaxed_bound": theory.relaxed_bound(A, m, stage1, keep, sink),
            "relaxed_candidates": theory.relaxed_bound(A, m, stage1, keep, sink, over="candidates"),
        }
        assert one_by_one.keys() == {each.name for each in fields(found)}
        noise = 1e-11 * float(V.abs().max() * W_O.abs().sum())
        for name, expected in one_by_one.items():
            assert_close(getattr(found, name)[s], expected, rtol=1e-8, atol=noise, equal_nan=True)


@both_norms
@law
@given(given=layers())
def test_order_of_the_bounds(p, given):
    """L ≤ θ_c ≤ θ ≤ θ̂ ≤ relaxed over candidates ≤ relaxed, and L of the layer ≤ Σ L."""
    found = consequences(**given, p=p)
    assert bool((found.perturbation <= found.centred_bound * ROUNDING).all())
    assert bool((found.centred_bound <= found.bound * ROUNDING).all())
    assert bool((found.layer_perturbation <= found.perturbation.sum(-1) * ROUNDING).all())
    valid = found.sigma > 0.5
    for name in STAGES[1:]:
        assert torch.equal(getattr(found, name).isnan(), ~valid)
    assert bool((found.bound <= found.stage2_bound * ROUNDING)[valid].all())
    assert bool((found.stage2_bound <= found.relaxed_candidates * ROUNDING)[valid].all())
    assert bool((found.relaxed_candidates <= found.relaxed_bound * ROUNDING)[valid].all())
    assert bool((found.sigma <= found.retained * ROUNDING).all())


@both_norms
def test_the_chain_holds_in_twenty_thousand_cases_with_none_left_out(p):
    """Strictly, at every fourth place at least: a chain of equalities would test nothing."""
    broken, strict, valid = 0, torch.zeros(5), 0
    for seed in range(20):
        given = layer(seed, H=10, K=5, J=10, n=16, D=8, S=100, sink=seed % 2 == 1)
        found = consequences(**given, p=p)
        names = ("perturbation", "centred_bound", "bound", "stage2_bound", "relaxed_candidates", "relaxed_bound")
        chain = torch.stack([getattr(found, name) for name in names])
        broken += int((chain[:-1] > chain[1:] * ROUNDING).sum())
        strict += (chain[:-1] < chain[1:] * 0.999).flatten(1).sum(1)
        valid += int((found.sigma > 0.5).sum())
    assert broken == 0 and 5_000 < valid < 19_000
    assert bool((strict[:2] > 10_000).all()) and bool((strict[2:] > 0.1 * valid).all())


@both_norms
@pytest.mark.parametrize("sink", [False, True])
def test_a_single_evicted_key_leaves_nothing_between_L_and_the_centred_bound(p, sink):
    given = layer(3, H=6, K=3, n=9, sink=sink) | {"keep": (~torch.eye(9, dtype=torch.bool))[:, None], "stage1": None}
    found = consequences(**given, p=p)
    assert_close(found.perturbation, found.centred_bound, rtol=1e-10, atol=0)
    assert bool((found.bound > 1.01 * found.centred_bound).any())


@both_norms
def test_keeping_everything_changes_nothing_at_all(p):
    given = layer(4, sink=True)
    given["keep"] = given["stage1"] = torch.ones_like(given["keep"])
    found = consequences(**given, p=p)
    names = ("mass", "value_mass", "perturbation", "centred_bound", "bound", "layer_perturbation")
    assert all(bool((getattr(found, name) == 0).all()) for name in names)
    assert all(bool((getattr(found, name) == 0).all()) for name in STAGES[1:])
    assert_close(found.retained, torch.ones_like(found.retained))


@both_norms
@law
@given(given=layers(), seed=st.integers(0, 2**31))
def test_the_order_of_keys_and_of_sets_does_not_matter(p, given, seed):
    g = torch.Generator().manual_seed(seed)
    keys, sets = (torch.randperm(size, generator=g) for size in (given["A"].shape[-1], len(given["keep"])))
    moved = given | {"A": given["A"][:, keys], "V": given["V"][:, keys]}
    moved |= {name: given[name][sets][..., keys] for name in ("keep", "stage1")}
    before, after = consequences(**given, p=p), consequences(**moved, p=p)
    noise = 1e-11 * float(given["V"].abs().max() * given["W_O"].abs().sum())
    clear = sharp(before.sigma[sets])
    for each in fields(before):
        mine, other = getattr(after, each.name), getattr(before, each.name)[sets]
        at = clear if each.name in STAGES else torch.ones_like(mine, dtype=torch.bool)
        assert_close(mine[at], other[at], rtol=1e-9, atol=noise, equal_nan=True)


@both_norms
def test_sets_of_all_heads_of_kv_heads_and_of_query_heads_are_the_same_sets(p):
    given = layer(5, H=6, K=2, J=1)
    for J in (2, 6):
        wider = given | {name: given[name].expand(-1, J, -1) for name in ("keep", "stage1")}
        for each in fields(theory.Consequences):
            one, many = (getattr(consequences(**args, p=p), each.name) for args in (given, wider))
            assert_close(many, one, rtol=0, atol=0, equal_nan=True)


def test_query_heads_read_the_kv_head_of_their_group():
    """Head h reads kv head h // (H // K): changing kv head 1 of two moves heads 2 and 3 of four, and no other."""
    given = layer(6)
    other = given | {"V": given["V"] * torch.tensor([1.0, 2.0]).double()[:, None, None]}
    before, after = (consequences(**args).perturbation for args in (given, other))
    assert_close(after, before * torch.tensor([1.0, 1.0, 2.0, 2.0]))


@both_norms
def test_blocks_change_nothing(p, monkeypatch):
    given = layer(7, n=301, D=17, S=5, sink=True)
    whole = consequences(**given, p=p)
    sizes, real = [], norms.row_blocks

    def spy(n, width, device):
        found = list(real(n, width, device))
        sizes.append(len(found))
        return iter(found)

    monkeypatch.setattr(MODULE, "row_blocks", spy)
    monkeypatch.setattr(norms, "CPU_THREAD_BLOCK_BYTES", 2000)
    cut = consequences(**given, p=p)
    assert min(sizes) > 10
    for each in fields(whole):
        assert_close(getattr(cut, each.name), getattr(whole, each.name), rtol=1e-12, atol=0, equal_nan=True)


def test_many_centres_are_part_of_the_block_size(monkeypatch):
    """A block holds a number for each of S + 1 centres a key, too: with many sets it has fewer keys."""
    widths = []
    monkeypatch.setattr(MODULE, "row_blocks", lambda n, width, device: widths.append(width) or iter([slice(0, n)]))
    for S in (1, 100):
        consequences(**layer(8, S=S))
    assert widths[-1] - widths[0] == 8 * 99


@both_norms
def test_small_retained_mass_costs_no_digits_even_from_float32(p):
    """R = 1e-7: the form that cancels would have no digit left; what comes in as fp32 is worked on in fp64."""
    n, R = 6, 1e-7
    A = torch.full((1, n), (1 - R) / (n - 1))
    A[0, 0] = R
    g = torch.Generator().manual_seed(0)
    given = {
        "A": A,
        "V": torch.randn(1, n, 4, generator=g).half(),
        "W_O": torch.randn(1, 4, 9, generator=g).bfloat16(),
        "keep": (torch.arange(n) == 0)[None, None],
        "stage1": (torch.arange(n) < 0)[None, None],
        "sink_mass": None,
    }
    exact = given | {name: given[name].double() for name in ("A", "V", "W_O")}
    found, truth = consequences(**given, p=p), slow(exact, p)
    assert float(found.retained) == float(A.double()[0, 0])
    for name in ("perturbation", "centred_bound", "layer_perturbation"):
        assert_close(getattr(found, name), truth[name], rtol=1e-13, atol=0)
    # the loop's Σ |A − A′| m takes Σ A = 1 for granted, which an fp32 row misses by 1e-8
    assert_close(found.bound, truth["bound"], rtol=1e-7, atol=0)


def test_without_first_stages_there_is_no_sigma():
    found = consequences(**layer(9) | {"stage1": None})
    assert [getattr(found, name) for name in STAGES] == [None] * 4


def test_a_learned_sink_alone_may_survive():
    given = layer(10, sink=True)
    given["keep"] = given["stage1"] = torch.zeros_like(given["keep"])
    found = consequences(**given)
    assert_close(found.retained, given["sink_mass"].expand_as(found.retained))
    assert_close(found.layer_perturbation, slow(given, 1)["layer_perturbation"], rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"p": 3}, "p = 3; allowed: 1, 2"),
        ({"A": torch.ones(4, 11).half()}, "A torch.float16; allowed: A \\[H, n\\] fp32 or fp64"),
        ({"A": torch.ones(11)}, "A \\[11\\]"),
        ({"V": torch.ones(2, 10, 3)}, "V \\[2, 10, 3\\]"),
        ({"V": torch.ones(3, 11, 3)}, "K \\| H"),
        ({"V": torch.ones(0, 11, 3)}, "K \\| H"),
        ({"W_O": torch.ones(4, 4, 6)}, "W_O \\[4, 4, 6\\]"),
        ({"W_O": torch.ones(2, 3, 6)}, "W_O \\[2, 3, 6\\]"),
        ({"sink_mass": torch.ones(3)}, "sink_mass \\[H\\]"),
        ({"keep": torch.ones(3, 4, 11)}, "keep is torch.float32 \\[3, 4, 11\\]; allowed: bool \\[sets, heads, 11\\]"),
        ({"keep": torch.ones(3, 4, 10, dtype=torch.bool)}, "keep is torch.bool \\[3, 4, 10\\]"),
        ({"keep": torch.ones(3, 3, 11, dtype=torch.bool)}, "heads \\| 4"),
        ({"keep": torch.ones(4, 11, dtype=torch.bool)}, "keep is torch.bool \\[4, 11\\]"),
        ({"stage1": torch.ones(3, 4, 11, dtype=torch.bool)}, "stage1 is no subset of keep"),
        ({"stage1": torch.zeros(3, 1, 11, dtype=torch.bool)}, "stage1 is no subset of keep"),
        ({"stage1": torch.zeros(3, 4, 11)}, "stage1 is torch.float32"),
        ({"keep": torch.zeros(3, 4, 11, dtype=torch.bool), "stage1": None}, "retains no attention mass \\(R = 0\\)"),
    ],
)  # fmt: skip
def test_refused_in_one_line(change, said):
    with pytest.raises(TheoryError, match=said) as caught:
        consequences(**layer(11) | change)
    assert "\n" not in str(caught.value)

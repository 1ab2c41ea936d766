"""Injected vectors: the target's norms by layer or head, a placebo's or a random direction."""

import pytest
import torch
from fake_trace import fake_trace
from torch.testing import assert_close

from kvprobe import theory
from kvprobe.errors import InterventionError, PromptError
from kvprobe.placebo.injecting import injection

TARGET, OTHER = ((3, 6), (12, 15)), (20, 25)
QUERIES = (26, 33, 39)
both_norms = pytest.mark.parametrize("p", [1, 2])
kinds = pytest.mark.parametrize("kind", [{}, {"sink": True}, {"window": 30, "pad": 2}, {"H": 3, "K": 1}])


def slow_deltas(trace, keys):
    """Δo of every layer, row and head, [L, Q, H, D]."""
    keep = torch.ones(trace.n, dtype=torch.bool)
    for start, stop in keys:
        keep[start:stop] = False
    layers = []
    for v in trace.view:
        A, sink = theory.attention(v.logits, None if v.sink is None else v.sink[:, None])
        V = theory.per_query_head(v.values, len(A))
        rows = [
            theory.perturbation_vector(A[:, q], V, v.w_o, keep.expand_as(A[:, q]), None if sink is None else sink[:, q])
            for q in range(A.shape[1])
        ]
        layers.append(torch.stack(rows))
    return torch.stack(layers)


def size(x, p):
    return torch.linalg.vector_norm(x, ord=p, dim=-1)


@kinds
@pytest.mark.parametrize("level", ["layer", "head"])
def test_the_targets_own_direction_gives_its_own_change_back(kind, level):
    trace = fake_trace(queries=QUERIES, **kind)
    found = injection(trace, TARGET, TARGET, level=level)
    assert sorted(found) == [0, 1]
    assert_close(torch.stack([found[0], found[1]]), slow_deltas(trace, TARGET).sum(2), rtol=1e-9, atol=1e-12)


@kinds
@both_norms
@pytest.mark.parametrize("direction", ["random", OTHER])
def test_by_layer_norms_are_the_targets_and_directions_the_others(kind, direction, p):
    trace = fake_trace(queries=QUERIES, **kind)
    found = torch.stack([*injection(trace, TARGET, direction, p=p).values()])
    own = slow_deltas(trace, TARGET).sum(2)
    assert_close(size(found, p), size(own, p), rtol=1e-9, atol=0)
    if direction == OTHER:
        other = slow_deltas(trace, (OTHER,)).sum(2)
        assert_close(found, other * (size(own, p) / size(other, p))[..., None], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(found, own, rtol=0.1)


@both_norms
def test_by_head_every_heads_norm_is_the_targets(p):
    trace = fake_trace(queries=QUERIES, sink=True)
    found = torch.stack([*injection(trace, TARGET, OTHER, level="head", p=p).values()])
    own, other = slow_deltas(trace, TARGET), slow_deltas(trace, (OTHER,))
    expected = (other * (size(own, p) / size(other, p))[..., None]).sum(2)
    assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for h in range(6):
        alone = torch.stack([*injection(trace, TARGET, "random", level="head", heads=h, p=p).values()])
        assert_close(size(alone, p), size(own[:, :, h], p), rtol=1e-9, atol=0)


def test_random_directions_are_seeded_and_differ_between_layers_and_rows():
    trace = fake_trace(queries=QUERIES)
    one, same, other = (injection(trace, TARGET, seed=seed) for seed in (3, 3, 4))
    for layer in (0, 1):
        assert torch.equal(one[layer], same[layer]) and not torch.allclose(one[layer], other[layer])
    units = torch.cat([x / size(x, 2)[:, None] for x in one.values()])
    assert ((units @ units.T) - torch.eye(6)).abs().max() < 0.95


def test_rows_before_the_target_and_unchosen_layers_get_nothing():
    trace = fake_trace(queries=(13, 33, 39))
    found = injection(trace, TARGET, OTHER, after=True, layers=1)
    assert list(found) == [1] and not found[1][0].any() and found[1][1:].any(-1).all()
    own = slow_deltas(trace, TARGET)[1, 1:].sum(1)
    assert_close(size(found[1][1:], 1), size(own, 1), rtol=1e-9, atol=0)


def test_the_models_dtype_comes_back():
    trace = fake_trace(queries=QUERIES, dtype=torch.float32)
    found = injection(trace, TARGET, OTHER)[0]
    assert found.dtype == torch.float32 and found.shape == (3, 9)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"level": "row"}, InterventionError, "level='row'; allowed: layer, head"),
        ({"seed": -1}, InterventionError, "seed=-1; allowed"),
        ({"seed": 0.5}, InterventionError, "seed=0.5; allowed"),
        ({"direction": (3, 99)}, PromptError, r"span \(3, 99\) with n = 40"),
        ({"direction": "Random"}, PromptError, "direction: the trace has no span 'Random'"),
        ({"direction": (36, 38)}, InterventionError, "direction 36:38 changes nothing in layer 0, row 26"),
    ],
)
def test_wrong_injections_are_one_line(how, error, message):
    with pytest.raises(error, match=message):
        injection(fake_trace(queries=QUERIES), TARGET, **how)

"""Doses: the κ law per head, the wanted share of the layer strength, and the limits."""

import math

import numpy as np
import pytest
import torch
from fake_trace import fake_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe import theory
from kvprobe.errors import InterventionError, PromptError, TheoryError
from kvprobe.placebo import set_strengths
from kvprobe.placebo.dosing import Curves, doses, doses_of_each
from kvprobe.placebo.scope import Scope

KEYS = ((3, 6), (12, 15))


def curve(scope, keys=KEYS):
    """β → strengths of one set."""
    curves = Curves.of(scope, [keys])

    def of(beta):
        return {name: float(x[0]) for name, x in curves.strengths(np.array([beta]), np.array([0])).items()}

    return of


def slow_dose(trace, keys, beta, p=1):
    """L and θ at β from softmax with a bias, one row at a time: summed over layers, averaged over rows."""
    L = theta = 0.0
    for v in trace.view:
        bias = torch.zeros(trace.n, dtype=torch.float64)
        for start, stop in keys:
            bias[start:stop] = -beta
        for q in range(len(v.queries)):
            moved = 0.0
            for h, W in enumerate(v.w_o):
                V, sink = v.values[h // (len(v.w_o) // len(v.values))], None if v.sink is None else v.sink[h]
                A, _ = theory.attention(v.logits[h, q], sink)
                after, _ = theory.attention(v.logits[h, q] + bias, sink)
                theta += float(theory.fractional_bound(A, after, theory.value_norms(V, W, p))) / len(v.queries)
                moved = moved + (after - A) @ V @ W
            L += float(moved.abs().sum() if p == 1 else moved.norm()) / len(v.queries)
    return {"perturbation": L, "bound": theta}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.booleans(), st.floats(0.02, 30), st.sampled_from([1, 2]))
def test_law_8_strengths_at_a_dose_are_those_of_the_biased_softmax(seed, sink, beta, p):
    trace = fake_trace(sink=sink, seed=seed)
    mine, slow = curve(Scope(trace, p=p))(beta), slow_dose(trace, KEYS, beta, p)
    for name in slow:
        assert mine[name] == pytest.approx(slow[name], rel=1e-10)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.booleans(), st.floats(0.02, 30))
def test_law_8_every_head_alone_has_the_share_kappa_in_both_measures(seed, sink, beta):
    trace = fake_trace(L=1, queries=(39,), sink=sink, seed=seed)
    for h in range(6):
        of = curve(Scope(trace, heads=h))
        dose, full = of(beta), of(math.inf)
        A, sink_mass = theory.attention(trace.view[0].logits[h, 0], None if not sink else trace.view[0].sink[h])
        a = float(A[3:6].sum() + A[12:15].sum())
        rest = float(A[:3].sum() + A[6:12].sum() + A[15:].sum()) + (float(sink_mass) if sink else 0.0)
        kappa = (1 - math.exp(-beta)) * rest / (1 - a * (1 - math.exp(-beta)))
        for name in ("perturbation", "bound"):
            assert dose[name] / full[name] == pytest.approx(kappa, rel=1e-10)


@pytest.mark.parametrize("kind", [{}, {"sink": True}, {"window": 10, "pad": 2}, {"H": 3, "K": 1}])
def test_a_dose_has_its_share_of_the_full_strength(kind):
    trace = fake_trace(**kind)
    found = doses(trace, KEYS, (0.1, 0.25, 0.5, 0.75, 0.99, 1.0))
    full = set_strengths(trace, [KEYS])
    assert [dose.kappa for dose in found] == [0.1, 0.25, 0.5, 0.75, 0.99, 1.0]
    assert found[-1].beta == math.inf and np.all(np.diff([dose.beta for dose in found]) > 0)
    for dose in found:
        assert dose.strengths["perturbation"] == pytest.approx(dose.kappa * full["perturbation"][0], rel=1e-9)
        if math.isfinite(dose.beta):
            assert dose.strengths == pytest.approx(slow_dose(trace, KEYS, dose.beta), rel=1e-9)
    assert found[-1].strengths["bound"] == pytest.approx(full["bound"][0], rel=1e-10)


def test_beta_to_infinity_meets_removal_and_to_zero_nothing():
    of = curve(Scope(fake_trace()))
    assert of(700.0) == pytest.approx(of(math.inf), rel=1e-12)
    assert of(1e-12)["perturbation"] < 1e-10


@pytest.mark.parametrize("how", [{}, {"after": True}, {"p": 2}])
def test_several_sets_at_once_are_each_alone(how):
    """Each set keeps its own rows, β and strengths, whatever stands beside it."""
    trace = fake_trace(queries=(20, 30, 39))
    sets = [KEYS, ((4, 9),), ((1, 2), (16, 19), (22, 24))]
    together = doses_of_each(Scope(trace, **how), sets, (0.2, 1.0, 0.7))
    for keys, found in zip(sets, together, strict=True):
        alone = doses(trace, keys, (0.2, 1.0, 0.7), **how)
        for one, other in zip(found, alone, strict=True):
            assert (one.kappa, one.strengths) == (other.kappa, pytest.approx(other.strengths, rel=1e-9))
            assert one.beta == pytest.approx(other.beta, rel=1e-8)


def test_doses_take_selectors_rows_and_weights():
    trace, how = fake_trace(queries=(10, 26, 39)), {"heads": {1: [0, 4]}, "after": True, "layer_weights": [1.0, 0.25]}
    (half,) = doses(trace, KEYS, [0.5], **how)
    full = set_strengths(trace, [KEYS], **how)
    assert half.strengths["perturbation"] == pytest.approx(full["perturbation"][0] / 2, rel=1e-9)


def test_heads_that_hold_nearly_everything_need_a_large_beta():
    def spike(logits):
        logits[..., 3] += 40
        return logits

    trace = fake_trace(L=1).map(logits=lambda x: spike(x.clone()))
    (half,) = doses(trace, (3, 4), [0.5])
    assert 20 < half.beta < 80
    assert half.strengths == pytest.approx(slow_dose(trace, ((3, 4),), half.beta), rel=1e-8)


@pytest.mark.parametrize(
    ("keys", "kappas", "error", "message"),
    [
        (KEYS, [0.0], InterventionError, "kappa = 0.0; allowed: 0 < kappa <= 1"),
        (KEYS, [1.5], InterventionError, "kappa = 1.5; allowed"),
        (KEYS, ["x"], InterventionError, "kappa = 'x'; allowed"),
        ((3, 99), [0.5], PromptError, r"span \(3, 99\) with n = 40"),
        ((0, 4), [0.5], TheoryError, "the set 0:4 is seen by no row"),
        ((0, 18), [0.5], TheoryError, "holds all attention"),
    ],
)
def test_wrong_doses_are_one_line(keys, kappas, error, message):
    with pytest.raises(error, match=message):
        doses(fake_trace(pad=4 if keys == (0, 4) else 0), keys, kappas)

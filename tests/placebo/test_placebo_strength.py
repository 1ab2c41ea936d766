"""Strengths of key sets against span measures summed by hand, and against boolean keep masks one row at a time."""

import numpy as np
import pytest
import torch
from fake_trace import fake_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe import theory
from kvprobe.errors import InterventionError, PromptError, TheoryError
from kvprobe.placebo import MEASURES, set_strengths, window_strengths
from kvprobe.placebo import strength as strength_module
from kvprobe.spans import all_spans, layer_perturbation, span_stats

SPANS = [(3, 9), (7, 8), (5, 30), (12, 20), (25, 40), (39, 40), (3, 9)]
UNIONS = [[(3, 6), (8, 9)], [(20, 24), (1, 2), (30, 33)], [(6, 7)], [(3, 6), (20, 24)]]
TRACES = {
    "causal": {},
    "learned sink": {"sink": True},
    "window, learned sink, pads": {"window": 6, "sink": True, "pad": 4},
    "pads": {"pad": 4},
    "multi-head": {"H": 3, "K": 3},
    "multi-query": {"H": 3, "K": 1},
}
every_trace = pytest.mark.parametrize("kind", TRACES.values(), ids=TRACES.keys())
both_norms = pytest.mark.parametrize("p", [1, 2])
OF_SPANS = {"bound": "bound", "centred": "centred_bound", "value_mass": "value_mass", "mass": "mass"}


def slow_strengths(trace, keys, p=1, *, layers=None, heads=None, after=False, weights=None):
    """Every measure by loops over layers, rows and heads, from boolean keep masks."""
    position, stop = torch.arange(trace.n), max(b for _, b in keys)
    keep = torch.ones(trace.n, dtype=torch.bool)
    for a, b in keys:
        keep &= (position < a) | (position >= b)
    rows = [q for q, at in enumerate(trace.view[0].queries.tolist()) if at >= stop or not after]
    total = dict.fromkeys(MEASURES, 0.0)
    for v in trace.view:
        if layers is not None and v.index not in layers:
            continue
        chosen = range(len(v.w_o)) if heads is None else heads.get(v.index, ())
        scale = (1.0 if weights is None else weights[v.index]) / len(rows)
        for q in rows:
            moved = torch.zeros(v.w_o.shape[-1], dtype=torch.float64)
            for h in chosen:
                A, sink = theory.attention(v.logits[h, q].double(), None if v.sink is None else v.sink[h].double())
                if float((A * ~keep).sum()) == 0:
                    continue
                V, W = v.values[h // (len(v.w_o) // len(v.values))].double(), v.w_o[h].double()
                m = theory.value_norms(V, W, p)
                total["mass"] += scale * float((A * ~keep).sum())
                total["value_mass"] += scale * float(theory.value_mass(A, m, keep))
                total["bound"] += scale * float(theory.bound(A, m, keep, sink))
                total["centred"] += scale * float(theory.centred_bound(A, V, W, keep, p, sink))
                moved += theory.perturbation_vector(A, V, W, keep, sink)
            total["perturbation"] += scale * float(moved.abs().sum() if p == 1 else moved.norm())
    return total


def close(table, rows, rtol=1e-9):
    for name in MEASURES:
        np.testing.assert_allclose(table[name], [row[name] for row in rows], rtol=rtol, atol=1e-13, err_msg=name)


@both_norms
@every_trace
def test_spans_equal_span_stats_summed_over_layers_and_heads_and_averaged_over_rows(kind, p):
    trace, shape = fake_trace(**kind), (2, -1, 2, len(SPANS))
    table, stats = set_strengths(trace, SPANS, p=p), span_stats(trace, SPANS, p=p)
    assert list(table.columns) == [*MEASURES, "length", "start", "stop"]
    for mine, theirs in OF_SPANS.items():
        expected = stats[theirs].to_numpy().reshape(shape).sum((0, 1)).mean(0)
        np.testing.assert_allclose(table[mine], expected, rtol=1e-9, atol=1e-13, err_msg=mine)
    layers = layer_perturbation(trace, SPANS, p)["perturbation"].to_numpy().reshape(2, 2, -1)
    np.testing.assert_allclose(table["perturbation"], layers.sum(0).mean(0), rtol=1e-9)
    assert table[["length", "start", "stop"]].iloc[2].tolist() == [25, 5, 30]


@both_norms
@every_trace
def test_unions_equal_boolean_keep_masks_one_row_at_a_time(kind, p):
    trace = fake_trace(**kind)
    close(set_strengths(trace, UNIONS, p=p), [slow_strengths(trace, keys, p) for keys in UNIONS])


@pytest.mark.parametrize("sink", [False, True])
def test_selected_layers_heads_weights_and_rows(sink):
    trace = fake_trace(L=3, queries=(17, 26, 39), sink=sink)
    some = {0: [1, 4, 5], 2: [3]}
    weights = [0.5, 7.0, 3.0]
    mine = set_strengths(trace, UNIONS[:1], heads=some, after=True, layer_weights=weights)
    close(mine, [slow_strengths(trace, UNIONS[0], heads=some, after=True, weights=weights)])
    later = [[(1, 3), (20, 22)]]
    close(set_strengths(trace, later, after=True), [slow_strengths(trace, later[0], after=True)])
    assert set_strengths(trace, later, after=True)["mass"][0] > set_strengths(trace, later)["mass"][0]
    close(set_strengths(trace, later, layers=2, heads=(1, 2)), [slow_strengths(trace, later[0], heads={2: [1, 2]})])


@both_norms
@every_trace
@pytest.mark.parametrize("length", [1, 5, 17])
def test_windows_equal_all_spans_and_sets(kind, p, length):
    trace = fake_trace(**kind)
    windows, spans = window_strengths(trace, length, p=p), all_spans(trace, length, p=p)
    for name in ("bound", "value_mass", "mass"):
        expected = getattr(spans, name).sum((0, 1)).mean(0)
        np.testing.assert_allclose(getattr(windows, name), expected, rtol=1e-9, atol=1e-13, err_msg=name)


def test_windows_take_selectors_and_their_own_rows():
    trace = fake_trace(queries=(17, 26, 39))
    how = {"heads": {1: [0, 4]}, "after": True, "layer_weights": [1.0, 0.25]}
    windows = window_strengths(trace, 6, **how)
    starts = [2, 11, 12, 20, 30]
    sets = set_strengths(trace, [(s, s + 6) for s in starts], **how)
    for name in ("bound", "value_mass", "mass"):
        np.testing.assert_allclose(getattr(windows, name)[starts], sets[name], rtol=1e-10)
    assert np.isnan(windows.bound[34:]).all() and np.isfinite(windows.bound[:34]).all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.booleans(), st.sampled_from([1, 2]))
def test_a_strength_is_the_sum_over_single_layers_and_l_theta_c_theta_are_ordered(seed, sink, p):
    trace = fake_trace(L=3, sink=sink, seed=seed)
    whole = set_strengths(trace, UNIONS, p=p)
    single = [set_strengths(trace, UNIONS, p=p, layers=layer) for layer in range(3)]
    for name in MEASURES:
        np.testing.assert_allclose(whole[name], sum(table[name] for table in single), rtol=1e-10, err_msg=name)
    assert (whole["perturbation"] <= whole["centred"] * (1 + 1e-9)).all()
    assert (whole["centred"] <= whole["bound"] * (1 + 1e-9)).all()
    assert (whole["value_mass"] <= whole["bound"]).all()


def dominated(trace, key, share):
    """Key ``key`` holds ``share`` of every row that sees it."""

    def edit(logits):
        others = logits.clone()
        others[..., key] = -torch.inf
        logits[..., key] = others.logsumexp(-1) + np.log(share / (1 - share))
        return logits

    return trace.map(logits=edit)


@pytest.mark.parametrize("share", [0.97, 1 - 1e-5, 1 - 1e-8, 1 - 1e-12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sets_that_hold_nearly_all_attention(share, dtype):
    trace = dominated(fake_trace(L=1, d=16, D=32).map(logits=torch.clone), 10, share)
    given = trace.map(values=lambda v: v.to(dtype), w_o=lambda w: w.to(dtype))
    exact = given.map(values=torch.Tensor.double, w_o=torch.Tensor.double)
    sets = [[(9, 12)], [(2, 3), (10, 11)], [(3, 5)]]
    close(
        set_strengths(given, sets),
        [slow_strengths(exact, keys) for keys in sets],
        1e-5 if dtype.itemsize == 4 else 1e-9,
    )
    swept = window_strengths(given, 3)
    np.testing.assert_allclose(swept.bound[9], slow_strengths(exact, [(9, 12)])["bound"], rtol=1e-6)


def test_float32_models_agree_with_float64_to_1e_5():
    trace = fake_trace(200, L=3, d=16, D=48, queries=tuple(range(150, 200)), dtype=torch.float32, seed=4)
    sets = [[(3, 20)], [(40, 50), (90, 120)], [(0, 149)], [(7, 8)]]
    close(set_strengths(trace, sets), [slow_strengths(trace, keys) for keys in sets], 1e-5)


def test_blocks_change_nothing(monkeypatch):
    trace = fake_trace(sink=True, window=6)
    whole = set_strengths(trace, [*SPANS, *UNIONS])
    monkeypatch.setattr(strength_module, "SETS_AT_ONCE", 3)
    monkeypatch.setattr("kvprobe.theory.norms.CPU_THREAD_BLOCK_BYTES", 500)
    split = set_strengths(trace, [*SPANS, *UNIONS])
    np.testing.assert_allclose(split.to_numpy(float), whole.to_numpy(float), rtol=1e-12)


def test_a_set_that_holds_all_attention_is_named_and_its_window_is_nan():
    trace = fake_trace(queries=(17, 39))
    with pytest.raises(TheoryError, match=r"the set 0:10 10:18 holds all attention of layer 0, head 0, row 17"):
        set_strengths(trace, [[(0, 10), (10, 18)]])
    windows = window_strengths(trace, 18)
    assert np.isnan(windows.bound).tolist() == [True] + [False] * 22
    assert np.isfinite(set_strengths(fake_trace(sink=True), [(0, 40)])["perturbation"][0])
    assert (window_strengths(fake_trace(pad=20, queries=(17, 39)), 3).mass[:18] == 0).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: set_strengths(t, []), PromptError, "no key sets given"),
        (lambda t: set_strengths(t, 5), PromptError, "sets is 5; allowed: a list of key sets"),
        (lambda t: set_strengths(t, [(3, 41)]), PromptError, r"span \(3, 41\) with n = 40"),
        (lambda t: set_strengths(t, [[(3, 9), (8, 12)]]), PromptError, "set 0 is .* overlap at 8"),
        (lambda t: set_strengths(t, ["evidence"]), PromptError, "set 0: the trace has no span 'evidence'; it has none"),
        (lambda t: set_strengths(t, [(3, 9)], measures=["theta"]), InterventionError, "allowed: a list of bound"),
        (lambda t: set_strengths(t, [(3, 9)], measures="bound"), InterventionError, "allowed: a list of bound"),
        (lambda t: set_strengths(t, [(3, 9)], p=3), TheoryError, "p = 3; allowed: 1, 2"),
        (lambda t: set_strengths(t, [(3, 9)], layers=7), InterventionError, "name no head of this trace"),
        (lambda t: set_strengths(t, [(3, 9)], layers=[]), InterventionError, "name no layer"),
        (lambda t: set_strengths(t, [(3, 9)], layers="all"), InterventionError, "layers='all' is not allowed"),
        (lambda t: set_strengths(t, [(3, 9)], heads=6), InterventionError, "head 6 does not exist: .* heads 0 … 5"),
        (lambda t: set_strengths(t, [(3, 9)], layer_weights=[1.0]), InterventionError, "none for layer 1"),
        (lambda t: set_strengths(t, [(3, 9)], layer_weights=[1, -1]), InterventionError, "one finite number >= 0"),
        (lambda t: set_strengths(t, [(3, 40)], after=True), PromptError, "no observed row follows the set 3:40"),
        (lambda t: window_strengths(t, 0), PromptError, "length = 0 with n = 40 keys"),
        (lambda t: window_strengths(t, "3"), PromptError, "length = '3' with n = 40 keys"),
    ],
)
def test_wrong_arguments_are_one_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call(fake_trace())
    assert "\n" not in str(caught.value)

"""Span measures: every law of theory.md at once, for all heads, queries and spans of a trace."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from fake_trace import fake_trace, slow_stats
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal
from torch.testing import assert_close

from kvprobe import theory
from kvprobe.errors import PromptError, TheoryError
from kvprobe.spans import all_spans, check_spans, layer_perturbation, ragged, span_stats
from kvprobe.spans.windows import outside_sums, window_sums

SPANS = [(0, 1), (3, 9), (7, 8), (5, 30), (0, 18), (12, 20), (25, 40), (39, 40), (0, 40), (3, 9)]
KEYS = ["layer", "head", "query", "start", "stop"]
TRACES = {
    "causal": {},
    "learned sink": {"sink": True},
    "window": {"window": 6},
    "window, learned sink, pads": {"window": 6, "sink": True, "pad": 4},
    "pads": {"pad": 4},
    "multi-head": {"H": 3, "K": 3},
    "multi-query": {"H": 3, "K": 1},
}
every_trace = pytest.mark.parametrize("kind", TRACES.values(), ids=TRACES.keys())
both_norms = pytest.mark.parametrize("p", [1, 2])


@both_norms
@every_trace
def test_laws_4_5_11_ragged_spans_against_one_at_a_time(kind, p):
    trace = fake_trace(**kind)
    slow = pd.DataFrame(slow_stats(trace, SPANS, p))
    assert_frame_equal(span_stats(trace, SPANS, p=p), slow, rtol=1e-9, atol=1e-12)


@both_norms
@every_trace
@pytest.mark.parametrize("length", [1, 2, 7, 39, 40])
def test_law_4_all_spans_against_ragged_spans(kind, p, length):
    trace = fake_trace(**kind)
    swept = all_spans(trace, length, p=p)
    spans = [(start, start + length) for start in range(40 - length + 1)]
    expected = span_stats(trace, spans, p=p, centred=False)
    frame = swept.frame()
    assert list(expected.columns) == [*KEYS, "mass", "value_mass", "bound", "perturbation", "visible", "retained"]
    assert_frame_equal(frame, expected[list(frame.columns)], rtol=1e-9, atol=1e-12)
    assert swept.bound.shape == (2, trace.view[0].logits.shape[0], 2, len(spans))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.integers(1, 60), st.data())
def test_law_4_window_and_outside_sums(seed, n, data):
    length = data.draw(st.integers(1, n))
    x = torch.rand(2, n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    inside = x.unfold(-2, length, 1).sum(-1)
    assert_close(window_sums(x, length), inside, rtol=1e-13, atol=0)
    assert_close(outside_sums(x, length), x.sum(-2, keepdim=True) - inside, rtol=1e-9, atol=1e-12)


def beside_a_sink(n, seed=0):
    """float32 heads whose key 0 holds 0.9998 of every row."""
    trace = fake_trace(n, L=1, H=4, K=2, d=16, D=32, queries=(n - 1,), dtype=torch.float32, seed=seed)

    def add_sink(logits):
        logits[..., 0] = logits[..., 1:].logsumexp(-1) + math.log(0.9998 / 0.0002)
        return logits

    return trace.map(logits=add_sink)


@both_norms
def test_law_4_all_float32_spans_beside_a_sink_of_0_9998(p):
    n, length = 8192, 20
    trace = beside_a_sink(n)
    single, double = all_spans(trace, length, p=p), all_spans(trace.map(values=torch.Tensor.double), length, p=p)
    assert single.perturbation.dtype == np.float32 and double.perturbation.dtype == np.float64
    for name in ("mass", "value_mass", "bound", "perturbation", "retained"):
        mine, exact = getattr(single, name), getattr(double, name)
        assert (mine > 0).all(), name
        assert np.abs(mine / exact - 1).max() < 1e-5, name
    assert double.mass[..., 0].min() > 0.9998 > 1e-3 > double.mass[..., 1:].max()


def test_law_4_float32_ragged_spans_beside_a_sink_of_0_9998():
    trace = beside_a_sink(8192)
    spans = [(0, 1), (0, 5000), (1, 8192), (1, 2), (4000, 4020), (8191, 8192), (0, 8191)]
    slow = pd.DataFrame(slow_stats(trace, spans))
    assert_frame_equal(span_stats(trace, spans), slow, rtol=1e-5, atol=0)


def test_law_4_differences_of_float32_prefix_sums_would_be_fatal():
    A = torch.softmax(beside_a_sink(8192).view[0].logits, -1)[..., None]
    prefix = A.cumsum(-2)
    assert (prefix[..., 20:, :] - prefix[..., :-20, :] <= 0).any()
    assert (window_sums(A, 20) > 0).all()


def test_gqa_query_head_h_reads_kv_head_h_over_G():
    """Only kv head 1 has values: heads 3, 4, 5 of 6 see them (h % 2 would be 1, 3, 5)."""

    def only_second(values):
        values[0] = 0
        return values

    table = span_stats(fake_trace(L=1).map(values=only_second), [(3, 9)])
    assert table[table.perturbation > 0]["head"].unique().tolist() == [3, 4, 5]
    swept = all_spans(fake_trace(L=1).map(values=only_second), 6)
    assert np.flatnonzero(swept.perturbation.any((0, 2, 3))).tolist() == [3, 4, 5]


def test_gqa_permuting_query_heads_inside_a_group_permutes_results_and_nothing_else():
    trace, order = fake_trace(sink=True), [1, 2, 0, 5, 4, 3]
    permuted = trace.map(**dict.fromkeys(("logits", "w_o", "sink"), lambda x: x[order]))
    table = span_stats(trace, SPANS).set_index(["layer", "head", "query"])
    other = span_stats(permuted, SPANS)
    other["head"] = np.array(order)[other["head"]]
    other = other.set_index(["layer", "head", "query"])
    assert_frame_equal(other.sort_index(kind="stable"), table.sort_index(kind="stable"), rtol=1e-12, atol=1e-15)


@both_norms
@every_trace
def test_law_9_layer_perturbation(kind, p):
    trace = fake_trace(**kind)
    table = layer_perturbation(trace, SPANS, p)
    heads = span_stats(trace, SPANS, p=p)
    of_layer = heads.groupby(["layer", "query"], sort=False)
    assert list(table.columns) == ["layer", "query", "start", "stop", "perturbation", "visible"]
    for (layer, query), rows in table.groupby(["layer", "query"], sort=False):
        mine = of_layer.get_group((layer, query))
        per_head = mine["perturbation"].to_numpy().reshape(-1, len(SPANS))
        assert (rows["visible"].to_numpy() == mine["visible"].to_numpy().reshape(-1, len(SPANS)).any(0)).all()
        defined = ~np.isnan(per_head).any(0)
        assert (rows["perturbation"].isna().to_numpy() == ~defined).all()
        assert (rows["perturbation"].to_numpy() <= per_head.sum(0) * (1 + 1e-12))[defined].all()
        slow = [_slow_layer(trace.view[layer], query, span, p) for span in np.array(SPANS)[defined]]
        np.testing.assert_allclose(rows["perturbation"][defined], slow, rtol=1e-10, atol=1e-13)


def _slow_layer(view, query, span, p):
    q = view.queries.tolist().index(query)
    A, sink_mass = theory.attention(view.logits[:, q], view.sink)
    keep = torch.ones(1, A.shape[-1], dtype=torch.bool)
    keep[:, span[0] : span[1]] = False
    return float(theory.layer_perturbation(A, view.values, view.w_o, keep, p, sink_mass))


@pytest.mark.parametrize("sink", [False, True])
def test_law_4_adding_one_vector_to_all_values_changes_nothing_unless_a_sink_is_learned(sink):
    trace = fake_trace(sink=sink)
    moved = trace.map(values=lambda values: values + torch.linspace(-3, 5, values.shape[-1], dtype=values.dtype))
    spans = [span for span in SPANS if span not in ((0, 40), (0, 18))]
    before, after = span_stats(trace, spans), span_stats(moved, spans)
    for name in ("perturbation", "centred_bound"):
        seen = before["visible"]
        change = (after[name] / before[name] - 1).abs()[seen]
        assert change.max() > 0.01 if sink else change.max() < 1e-9
    swept = [all_spans(t, 6).perturbation for t in (trace, moved)]
    assert np.allclose(*swept, rtol=1e-9, atol=1e-12) != sink


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@both_norms
def test_law_11_order_of_the_columns(p, dtype):
    table = span_stats(fake_trace(L=4, sink=True, dtype=dtype, seed=3), SPANS, p=p)
    assert (table["perturbation"] <= table["centred_bound"]).all()
    assert (table["centred_bound"] <= table["bound"] * (1 + 1e-6)).all()
    single = table[(table["stop"] - table["start"] == 1) & table["visible"]]
    np.testing.assert_allclose(single["centred_bound"], single["perturbation"], rtol=2e-6)


def test_a_span_of_all_attention_has_no_row_left():
    table = span_stats(fake_trace(L=1), [(0, 18)]).set_index("query")
    blank = ["bound", "centred_bound", "perturbation"]
    assert table.loc[17, blank].isna().all(axis=None) and table.loc[39, blank].notna().all(axis=None)
    assert table.loc[17, "visible"].all() and (table.loc[17, "retained"] == 0).all()
    np.testing.assert_allclose(table.loc[17, "mass"], 1, rtol=1e-12)
    swept = all_spans(fake_trace(L=1), 18)
    assert np.isnan(swept.perturbation[:, :, 0, 0]).all() and not np.isnan(swept.perturbation[:, :, 0, 1:]).any()
    assert not span_stats(fake_trace(L=1, sink=True), [(0, 40)]).isna().any(axis=None)


@pytest.mark.parametrize("sink", [False, True])
def test_a_query_that_sees_nothing(sink):
    trace = fake_trace(pad=20, queries=(17, 39), sink=sink)
    table = span_stats(trace, SPANS).set_index("query").loc[17]
    measures = table[["mass", "value_mass", "bound", "centred_bound", "perturbation"]]
    assert (measures == 0).all(axis=None) and not table["visible"].any()
    assert (table["retained"] == (1 if sink else 0)).all()
    blind = fake_trace(pad=30, queries=(17, 20), sink=sink)
    swept = all_spans(blind, 3)
    assert not span_stats(blind, SPANS)["visible"].any() and not swept.visible.any()
    for some in (swept, all_spans(trace, 3)):
        assert (some.retained[:, :, 0] == (1 if sink else 0)).all() and not some.perturbation[:, :, 0].any()


def test_many_spans_are_done_in_batches_with_the_same_result(monkeypatch):
    trace = fake_trace(sink=True, window=6)
    whole, layers = span_stats(trace, SPANS), layer_perturbation(trace, SPANS)
    monkeypatch.setattr(ragged, "SPANS_AT_ONCE", 3)
    assert_frame_equal(span_stats(trace, SPANS), whole, rtol=1e-12, atol=1e-15)
    assert_frame_equal(layer_perturbation(trace, SPANS), layers, rtol=1e-12, atol=1e-15)


def test_blocks_of_key_span_pairs_do_not_change_the_centred_bound(monkeypatch):
    trace = fake_trace(sink=True)
    whole = span_stats(trace, SPANS)
    monkeypatch.setattr("kvprobe.theory.norms.CPU_THREAD_BLOCK_BYTES", 500)
    assert_frame_equal(span_stats(trace, SPANS), whole, rtol=1e-12, atol=1e-15)


def test_bfloat16_models_are_worked_out_in_float32():
    trace = fake_trace(dtype=torch.float32)
    half = trace.map(values=torch.Tensor.bfloat16, w_o=torch.Tensor.bfloat16)
    same = half.map(values=torch.Tensor.float, w_o=torch.Tensor.float)
    assert_frame_equal(span_stats(half, SPANS), span_stats(same, SPANS), rtol=0, atol=0)
    assert_frame_equal(all_spans(half, 4).frame(), all_spans(same, 4).frame(), rtol=0, atol=0)


def test_models_that_require_gradients_leave_no_graph():
    trace = fake_trace().map(w_o=lambda w: w.requires_grad_())
    assert_frame_equal(span_stats(trace, SPANS), span_stats(fake_trace(), SPANS))
    assert_frame_equal(all_spans(trace, 4).frame(), all_spans(fake_trace(), 4).frame())


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(3, 9), (30, 41)], r"span \(30, 41\) with n = 40 keys; allowed: 0 <= start < stop <= 40"),
        ([(-3, -1)], r"span \(-3, -1\) with n = 40 keys"),
        ([(5, 5)], r"span \(5, 5\) with n = 40 keys"),
        ([(9, 3)], r"span \(9, 3\) with n = 40 keys"),
        ([], r"no spans given; allowed: at least one \(start, stop\) with 0 <= start < stop <= 40"),
        ([(1, 2, 3)], r"span \(1, 2, 3\); allowed: two integers"),
        ([(1.0, 2)], r"span \(1\.0, 2\); allowed: two integers"),
        ([7], r"span 7; allowed: two integers"),
    ],
)
def test_wrong_spans_are_quoted(spans, message):
    for function in (span_stats, layer_perturbation):
        with pytest.raises(PromptError, match=message):
            function(fake_trace(), spans)


def test_wrong_lengths_and_norms_are_quoted():
    for length in (0, 41, -2):
        with pytest.raises(PromptError, match=rf"length = {length} with n = 40 keys; allowed: 1 to 40"):
            all_spans(fake_trace(), length)
    for call in (lambda: span_stats(fake_trace(), SPANS, p=3), lambda: all_spans(fake_trace(), 5, p=3)):
        with pytest.raises(TheoryError, match="p = 3; allowed: 1, 2"):
            call()


@pytest.mark.parametrize("spans", [None, 5, "0:4"])
def test_spans_that_are_no_list_are_one_line(spans):
    with pytest.raises(PromptError, match=r"allowed: a list of \(start, stop\)"):
        check_spans(spans, 10)


@pytest.mark.parametrize("length", [None, "3", 2.0, True])
def test_a_length_that_is_no_whole_number_is_one_line(length):
    with pytest.raises(PromptError, match="whole number from 1 to 7"):
        all_spans(SimpleNamespace(n=7, layers=list), length)

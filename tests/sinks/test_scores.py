"""Mass, value mass and ratio: equal to loops over single numbers, streamed, on every kind of layer and family."""

import catalogue
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from sink_traces import QUERIES, TRACES, norms, row_trace, slow_scores, tables
from tiny import FAMILIES

from kvprobe import Prompt, observe, sinks
from kvprobe.errors import PromptError, TheoryError
from kvprobe.sinks import streaming

every_trace = pytest.mark.parametrize("kind", TRACES.values(), ids=TRACES.keys())
families = pytest.mark.parametrize("family", FAMILIES)
TIGHT = {"rtol": 1e-11, "atol": 1e-15}


@every_trace
@pytest.mark.parametrize("p", [1, 2])
def test_scores_are_the_loops(kind, p):
    trace = row_trace(**kind)
    found = sinks.scores(trace, p=p)
    mass, m, seen, learned = slow_scores(trace, p)
    assert_allclose(found.mass, mass, **TIGHT)
    assert_allclose(found.norms, m, rtol=1e-9)
    assert_allclose(found.learned, learned, **TIGHT)
    assert (found.seen == seen).all() and found.shape == mass.shape
    assert found.mass.dtype == found.norms.dtype == np.float64
    assert (found.queries, found.pad, found.p, found.epsilon) == (QUERIES, kind.get("pad", 0), p, 1e-4)
    assert np.isnan(found.mass[:, :, : found.pad]).all() and not found.seen[:, : found.pad].any()


@every_trace
@pytest.mark.parametrize("rows", [1, 4, 5])
def test_chunks_of_rows_change_nothing_and_bound_what_is_held(kind, rows, monkeypatch):
    trace = row_trace(**kind)
    whole = sinks.scores(trace)
    monkeypatch.setattr(streaming, "CHUNK_BYTES", 8 * trace.n_heads * trace.n * rows)
    monkeypatch.setattr(streaming, "MIN_ROWS", 1)
    trace.asked.clear()
    parts = sinks.scores(trace)
    assert max(trace.asked) == rows
    for name in ("mass", "norms", "learned"):
        assert_allclose(getattr(parts, name), getattr(whole, name), **TIGHT)
    assert (parts.seen == whole.seen).all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.integers(2, 25), st.data())
def test_scores_of_any_trace(seed, n, data):
    queries = tuple(sorted(data.draw(st.sets(st.integers(1, n - 1), min_size=1))))
    pad = data.draw(st.integers(0, queries[0]))
    kind = {"window": data.draw(st.integers(1, n)), "sink": data.draw(st.booleans()), "pad": pad, "seed": seed}
    trace = row_trace(n, queries, d=2, D=3, **kind)
    found = sinks.scores(trace)
    mass, _, seen, learned = slow_scores(trace)
    assert_allclose(found.mass, mass, **TIGHT)
    assert_allclose(found.learned, learned, **TIGHT)
    assert (found.seen == seen).all()
    # what the rows spend adds up: Σ_j (rows that see j) s_j + rows · learned = rows
    spent = (np.nan_to_num(found.mass) * seen[:, None]).sum(-1) + len(queries) * found.learned
    assert_allclose(spent, float(len(queries)), rtol=1e-12)


@families
@pytest.mark.parametrize("queries", [-1, [5, 13, 25], slice(None)], ids=["last", "three", "all"])
def test_every_family_against_plain_transformers(family, queries, tiny, plain):
    """Windows, learned sinks and soft-caps: eager attention of plain transformers, averaged by hand."""
    ids = catalogue.ids(3)
    trace = observe(tiny(family), Prompt.from_ids(ids), queries)
    found, reference = sinks.scores(trace), plain(family)
    A = reference(ids).attention.double()[:, :, trace.queries]
    for layer in range(3):
        visible = reference.visible(layer, len(ids))[trace.queries]
        seen = visible.sum(0)
        assert (found.seen[layer] == seen.numpy()).all()
        mean = torch.where(seen > 0, A[layer].sum(1) / seen, torch.nan)
        assert_allclose(found.mass[layer], mean.numpy(), rtol=2e-4, atol=2e-6)
        assert_allclose(found.learned[layer], (1 - A[layer].sum(-1)).mean(1).numpy(), atol=5e-6)
        assert_allclose(found.norms[layer], norms(trace.layer(layer), 1), rtol=1e-9)
    assert (found.learned > 0).all() if family == "gpt_oss" else (found.learned == 0).all()


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_left_pads_are_nothing(family, tiny):
    ids = catalogue.ids(4)
    padded = Prompt.from_ids([0, 0, 0, *ids], attention_mask=[0] * 3 + [1] * len(ids))
    one = sinks.scores(observe(tiny(family), Prompt.from_ids(ids), slice(-9, None)))
    other = sinks.scores(observe(tiny(family), padded, slice(-9, None)))
    assert other.pad == 3 and other.queries == tuple(q + 3 for q in one.queries)
    for name in ("mass", "norms"):
        assert_allclose(getattr(other, name)[..., 3:], getattr(one, name), rtol=1e-5, atol=1e-8)
    assert (other.seen[:, 3:] == one.seen).all() and not other.seen[:, :3].any()
    assert np.isnan(other.mass[..., :3]).all() and np.isnan(other.value_mass()[..., :3]).all()
    for pool in ("head", "layer", "all"):
        assert np.isnan(other.ratio(pool)[..., :3]).all() and np.isnan(other.pooled("norm", pool)[..., :3]).all()
        assert_allclose(other.ratio(pool, relative=True)[..., 3:], one.ratio(pool, relative=True), rtol=1e-5, atol=1e-8)


@every_trace
def test_one_row_adds_up_to_one(kind):
    found = sinks.scores(row_trace(**kind), rows=30)
    assert_allclose(np.nan_to_num(found.mass).sum(-1) + found.learned, 1.0, rtol=1e-12)


@every_trace
@pytest.mark.parametrize("epsilon", [None, 0, 0.0, 1e-4, 0.25])
def test_value_mass_is_the_mean_of_single_value_masses(kind, epsilon):
    trace = row_trace(**kind)
    found = sinks.scores(trace, epsilon=3e-3)
    added = 3e-3 if epsilon is None else epsilon
    A, _, visible = tables(trace)
    for layer in range(2):
        m = norms(trace.layer(layer), 1)
        for h in range(trace.n_heads):
            for j in range(trace.n):
                each = [(A[layer][h, q, j] + added) * m[h, j] for q in range(6) if visible[layer][q, j]]
                expected = sum(each) / len(each) if each else np.nan
                assert_allclose(found.value_mass(epsilon)[layer, h, j], expected, rtol=1e-9)


@every_trace
@pytest.mark.parametrize("relative", [False, True])
def test_ratios_are_sums_over_rows_heads_and_layers(kind, relative):
    trace = row_trace(**kind)
    found = sinks.scores(trace)
    A, _, visible = tables(trace)
    m = np.stack([norms(trace.layer(layer), 1) for layer in range(2)])
    if relative:
        for layer in range(2):
            seen = visible[layer].any(0)
            for h in range(trace.n_heads):
                m[layer, h] /= np.median(m[layer, h, seen])
    for j in range(trace.n):
        pairs = [
            [[(A[layer][h, q, j], m[layer, h, j]) for q in range(6)] for h in range(trace.n_heads)]
            for layer in range(2)
        ]
        for layer in range(2):
            for h in range(trace.n_heads):
                assert_allclose(found.ratio("head", relative)[layer, h, j], ratio(pairs[layer][h]), rtol=1e-9)
            everyone = [pair for head in pairs[layer] for pair in head]
            assert_allclose(found.ratio("layer", relative)[layer, j], ratio(everyone), rtol=1e-9)
            alone = found.ratio("all", relative, layers=[layer])
            assert_allclose(alone[j], ratio(everyone), rtol=1e-9)
        everything = [pair for layer in pairs for head in layer for pair in head]
        assert_allclose(found.ratio("all", relative)[j], ratio(everything), rtol=1e-9)


def ratio(pairs):
    """Σ A m / Σ A of (A, m) pairs."""
    below = sum(a for a, _ in pairs)
    return sum(a * m for a, m in pairs) / below if below > 0 else np.nan


def test_a_ratio_without_mass_is_not_a_number():
    """A visible key whose weight underflows to 0: s is 0, ρ undefined, and neither poisons the pools."""
    trace = row_trace()
    for view in trace.view:
        view.logits[:, :, 3] = -1e5
    trace.view[0].logits[2, :, 3] = 0.0
    found = sinks.scores(trace)
    assert found.mass[1, 0, 3] == 0 and np.isnan(found.ratio()[1, 0, 3]) and np.isnan(found.ratio("layer")[1, 3])
    assert_allclose(found.ratio("layer")[0, 3], found.norms[0, 2, 3], rtol=1e-12)
    assert_allclose(found.ratio("all")[3], found.norms[0, 2, 3], rtol=1e-12)
    assert_allclose(found.ratio()[1, 0, 4:6], found.norms[1, 0, 4:6], rtol=0)


def test_a_head_without_values_has_no_relative_norm():
    trace = row_trace(window=6)
    trace.view[0].w_o[1] = 0
    found = sinks.scores(trace)
    assert np.isnan(found.relative_norms()[0, 1]).all() and not np.isnan(found.relative_norms()[0, 0]).any()


@every_trace
@pytest.mark.parametrize("quantity", ["mass", "value_mass", "norm"])
def test_pools_are_means(kind, quantity):
    found = sinks.scores(row_trace(**kind))
    table = {"mass": found.mass, "value_mass": (found.mass + 0.01) * found.norms, "norm": found.norms}[quantity]
    L, H, n = table.shape
    for j in range(n):
        by_layer = [table[layer, :, j].sum() / H if found.seen[layer, j] else np.nan for layer in range(L)]
        assert_allclose(found.pooled(quantity, "layer", epsilon=0.01)[:, j], by_layer, rtol=1e-12)
        there = [x for x in by_layer if x == x]
        expected = sum(there) / len(there) if there else np.nan
        assert_allclose(found.pooled(quantity, "all", epsilon=0.01)[j], expected, rtol=1e-12)
        assert_allclose(found.pooled(quantity, "all", epsilon=0.01, layers=[1])[j], by_layer[1], rtol=1e-12)
    unseen = np.broadcast_to(found.seen[:, None] == 0, table.shape)
    assert (np.isnan(found.pooled(quantity, "head")) == unseen).all()


def test_relative_pools():
    found = sinks.scores(row_trace(window=6), epsilon=0.02)
    m = found.relative_norms()
    m[np.broadcast_to(found.seen[:, None] == 0, m.shape)] = np.nan
    assert_allclose(found.pooled("norm", "head", relative=True), m)
    assert_allclose(found.pooled("value_mass", "head", relative=True), (found.mass + 0.02) * m)
    assert_allclose(found.pooled("mass", "head", relative=True), found.mass)
    assert_allclose(np.nanmedian(m, -1), 1.0)


def test_rows_by_position():
    trace = row_trace(window=6, sink=True)
    for rows, names in (([38, 11], (11, 38)), (-1, (39,)), (slice(30, 31), (30,)), ([-2, -1], (38, 39))):
        found = sinks.scores(trace, rows=rows)
        mass, _, seen, learned = slow_scores(trace, rows=names)
        assert found.queries == names
        assert_allclose(found.mass, mass, **TIGHT)
        assert_allclose(found.learned, learned, **TIGHT)
        assert (found.seen == seen).all()
    with pytest.raises(TheoryError, match=r"rows name position 12, which the trace did not observe; allowed: \[6, 11"):
        sinks.scores(trace, rows=[11, 12])
    with pytest.raises(PromptError, match=r"allowed positions are 0 … 39"):
        sinks.scores(trace, rows=[40])


@pytest.mark.parametrize("epsilon", [-1e-9, float("nan"), float("inf"), 1.1e6, 1e308, 1j, "1e-4", None, True])
def test_an_epsilon_that_is_none(epsilon):
    with pytest.raises(TheoryError, match=r"epsilon=.*; allowed: a number from 0 to 1e\+06"):
        sinks.scores(row_trace(), epsilon=epsilon)
    assert np.isfinite(sinks.scores(row_trace(), epsilon=1e6).value_mass()).all()


def test_what_is_no_trace():
    for wrong in ("x", None, sinks.scores(row_trace())):
        with pytest.raises(TheoryError, match=r"trace=.*; allowed: a Trace, such as kvprobe.observe returns"):
            sinks.scores(wrong)
    with pytest.raises(TheoryError, match=r"buckets=None; allowed: what sinks.buckets returns"):
        sinks.scores(row_trace()).bucket_table(None)


def test_other_words_are_one_line():
    found = sinks.scores(row_trace())
    with pytest.raises(TheoryError, match="pool='heads'; allowed: head, layer, all"):
        found.ratio("heads")
    with pytest.raises(TheoryError, match="quantity='sum'; allowed: mass, value_mass, norm"):
        found.pooled("sum")
    for layers in ([], [2], [0, 0], [-1], 1, ["0"]):
        with pytest.raises(TheoryError, match=r"layers=.*; allowed: one or more of 0 … 1, each once"):
            found.ratio("all", layers=layers)
    with pytest.raises(TheoryError, match="p = 3; allowed: 1, 2"):
        sinks.scores(row_trace(), p=3)

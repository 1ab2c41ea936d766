"""prefill, observe and intervene on every tiny family, against plain transformers and fp64 loops."""

import math

import catalogue
import numpy as np
import pytest
import tiny as families
import torch
from catalogue import CONTINUED, LAYERS, SUFFIX, N
from oracles import Plain
from torch.testing import assert_close

from kvprobe import KVMask, Prompt, intervene, observe, prefill, runs, span_stats
from kvprobe.errors import InterventionError, PromptError

every_family = pytest.mark.parametrize("family", families.FAMILIES)
IDS = catalogue.ids()
PROMPT = Prompt.from_ids(IDS, {"needle": (4, 7)})
SPANS = [(0, 1), (0, 3), (4, 9), (8, 20), (19, 24), (23, 26)]


def close(mine, reference):
    assert_close(mine, reference, atol=5e-5, rtol=1e-5)


@every_family
@pytest.mark.parametrize("suffix", [1, 5, 8, N])
def test_suffix_logits_are_transformers(family, suffix, tiny, plain):
    reference = plain(family)([*IDS, *CONTINUED]).logits
    clean = intervene(tiny(family), PROMPT, [()], suffix=suffix, continuation=CONTINUED)[0]
    close(clean.logits, reference[N - suffix :])
    assert clean.positions == list(range(N - suffix, N + 3)) and clean.ids.tolist() == [*IDS, *CONTINUED]
    rows = intervene(tiny(family), PROMPT, [()], suffix=suffix, continuation=CONTINUED, logits="continuation")[0]
    close(rows.logits, reference[N - 1 :])
    assert rows.positions == [N - 1, N, N + 1, N + 2]


@every_family
@pytest.mark.parametrize("n", [1, 2, 5, 6, 7])
def test_short_prompts(family, n, tiny, plain):
    """One token, a prompt as long as a window, and one longer."""
    prompt = Prompt.from_ids(IDS[:n])
    clean = intervene(tiny(family), prompt, [(), KVMask([])], suffix=n, continuation=[9], generate=2)
    reference = plain(family)([*IDS[:n], 9])
    for out in clean:
        close(out.logits, reference.logits)
        for layer in LAYERS:
            close(out.attention(layer), reference.attention[layer])
    assert clean[0].generated == plain(family).greedy(IDS[:n], 2, lambda total: None, {2})
    if n > 1:
        masked = intervene(tiny(family), prompt, KVMask((0, 1), queries="after"))
        table = torch.zeros(3, 6, n, n)
        table[:, :, 1:, 0] = -torch.inf
        close(masked.logits, plain(family)(IDS[:n], table).logits[1:])
    close(observe(tiny(family), prompt).layer(2).attention, plain(family)(IDS[:n]).attention[2][:, -1:])


@every_family
@pytest.mark.parametrize("cut", [None, 1, 10, 18, N])
@pytest.mark.parametrize(
    ("queries", "meant"),
    [
        (-1, [25]),
        (18, [18]),
        (np.int64(20), [20]),
        ([24, 19, -1, 19], [19, 24, 25]),
        (torch.tensor([-3, 21]), [21, 23]),
        (range(20, 23), [20, 21, 22]),
        (slice(20, 24), [20, 21, 22, 23]),
        (slice(-4, None, 3), [22, 25]),
        (slice(None, 19, -2), [21, 23, 25]),
    ],
)
def test_observed_rows_are_transformers(family, cut, queries, meant, tiny, plain):
    prefix = None if cut is None else prefill(tiny(family), PROMPT, cut)
    trace, reference = observe(tiny(family), PROMPT, queries, prefix=prefix), plain(family)(IDS)
    assert trace.queries == meant and trace.n == N and trace.n_layers == 3 and trace.n_heads == 6
    for view in trace.layers():
        rows = view.attention
        assert rows.dtype == torch.float32 and view.queries.tolist() == meant
        assert_close(rows, reference.attention[view.index][:, meant], atol=1e-5, rtol=1e-4)
        hidden = ~plain(family).visible(view.index, N)[meant]
        assert bool((view.logits[:, hidden] == -torch.inf).all()) and bool((view.logits[:, ~hidden] > -torch.inf).all())


def slow_stats(a, sink, values, w_o, span, p):
    """The laws' numbers for one row, head and span, in fp64, by definition: mask, renormalise, project, subtract."""
    evicted = torch.zeros(len(a), dtype=torch.bool)
    evicted[slice(*span)] = True
    evicted &= a > 0
    projected = values.double() @ w_o.double()
    norm = projected.norm(p=p, dim=-1)
    mass, kept = a[evicted].sum(), a[~evicted].sum() + sink
    masked = torch.where(evicted, 0.0, a) / kept
    shift = (masked @ projected) - (a @ projected)
    value_mass, kept_value_mass = (a * norm)[evicted].sum(), (a * norm)[~evicted].sum()
    centre = masked @ projected
    return {
        "mass": mass,
        "value_mass": value_mass,
        "bound": value_mass + mass / kept * kept_value_mass,
        "centred_bound": (a * (centre - projected).norm(p=p, dim=-1))[evicted].sum(),
        "perturbation": shift.norm(p=p),
        "retained": kept,
    }


@every_family
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_span_stats_are_a_loop_over_transformers(family, p, seed, tiny, tiny_folder):
    ids, queries = catalogue.ids(seed), [3, 17, N - 1]
    # In fp64 a learned sink's mass is 1 − Σ A; its attention is gone from what transformers returns.
    slow_model = Plain(tiny_folder(family), torch.float64)
    hf, reference = slow_model.hf, slow_model(ids)
    with torch.no_grad():
        cache = hf(input_ids=torch.tensor([ids]), use_cache=True, past_key_values=_whole_cache()).past_key_values
    blocks = [m for m in hf.modules() if hasattr(m, "layer_idx") and (hasattr(m, "o_proj") or hasattr(m, "c_proj"))]
    frame = span_stats(observe(tiny(family), Prompt.from_ids(ids), queries), SPANS, p=p)
    slow = {name: [] for name in ("mass", "value_mass", "bound", "centred_bound", "perturbation", "retained")}
    for row in frame.itertuples():
        projection = blocks[row.layer].c_proj.weight if family == "gpt2" else blocks[row.layer].o_proj.weight.T
        w_o = projection.detach()[row.head * 8 : row.head * 8 + 8]
        kv = row.head // (6 // cache.layers[row.layer].values.shape[1])
        values = cache.layers[row.layer].values[0, kv]
        a = reference.attention[row.layer][row.head, row.query].double()
        sink = 1 - a.sum() if family == "gpt_oss" else 0.0
        for name, value in slow_stats(a, sink, values, w_o, (row.start, row.stop), p).items():
            slow[name].append(float(value))
    for name, column in slow.items():
        expected = np.array(column)
        whole = frame["retained"].to_numpy() < 1e-9  # a span that holds the whole row, without a sink: defined as NaN
        assert (~whole).mean() > 0.8
        error = np.abs(frame[name].to_numpy() - expected)[~whole]
        scale = np.abs(expected[~whole])
        assert (error <= 1e-4 * (scale + 1e-3 * scale.max())).all(), name
    visible = [bool(slow_model.visible(r.layer, N)[r.query, r.start : r.stop].any()) for r in frame.itertuples()]
    assert frame["visible"].tolist() == visible
    assert not frame.loc[~frame["visible"], ["mass", "value_mass", "bound", "perturbation"]].any(axis=None)


def _whole_cache():
    """A cache that keeps what a window layer will not see again, as transformers' default one does not."""
    from transformers import DynamicCache

    return DynamicCache()


@every_family
def test_a_given_prefix_changes_nothing(family, tiny):
    model = tiny(family)
    arms = [(), KVMask("needle"), KVMask((15, 21), queries="after"), KVMask((2, 8), queries=(8, 20))]
    without = intervene(model, PROMPT, arms, suffix=SUFFIX)
    for cut in (1, 8, N - SUFFIX, N):
        given = intervene(model, PROMPT, arms, suffix=SUFFIX, prefix=prefill(model, PROMPT, cut))
        for out, reference in zip(given, without, strict=True):
            close(out.logits, reference.logits)
            close(out.attention(2), reference.attention(2))
    traced = observe(model, PROMPT).prefix(N - SUFFIX)
    for out, reference in zip(intervene(model, PROMPT, arms, suffix=SUFFIX, prefix=traced), without, strict=True):
        close(out.logits, reference.logits)


def test_a_given_prefix_spares_the_context(tiny, monkeypatch):
    from kvprobe import engine

    model, prefix = tiny("llama"), prefill(tiny("llama"), PROMPT, N - SUFFIX)
    lengths, forward = [], engine.forward
    monkeypatch.setattr(
        engine, "forward", lambda t, ids, *a, **k: lengths.append(ids.shape) or forward(t, ids, *a, **k)
    )
    intervene(model, PROMPT, [KVMask("needle"), KVMask((9, 12))], suffix=SUFFIX, prefix=prefix)
    observe(model, PROMPT, slice(-SUFFIX, None), prefix=prefix)
    assert lengths == [(2, SUFFIX), (1, SUFFIX)]


def test_many_arms_share_one_prefill(tiny, monkeypatch):
    from kvprobe import engine

    lengths, forward = [], engine.forward
    monkeypatch.setattr(
        engine, "forward", lambda t, ids, *a, **k: lengths.append(ids.shape) or forward(t, ids, *a, **k)
    )
    intervene(tiny("llama"), PROMPT, [KVMask((k, k + 1)) for k in range(7)], suffix=SUFFIX, batch=4)
    assert lengths == [(1, N - SUFFIX), (4, SUFFIX), (3, SUFFIX)]


@every_family
@pytest.mark.parametrize("pads", [1, 3, 9])
def test_left_pads_change_nothing_but_positions(family, pads, tiny):
    model = tiny(family)
    padded = Prompt.from_ids([0] * pads + IDS, {"needle": (4 + pads, 7 + pads)}, attention_mask=[0] * pads + [1] * N)

    def shift(span):
        return span[0] + pads, span[1] + pads

    frame = span_stats(observe(model, PROMPT, [17, -1]), SPANS)
    moved = span_stats(observe(model, padded, [17 + pads, -1]), [shift(span) for span in SPANS])
    for name in ("query", "start", "stop"):
        moved[name] -= pads
    np.testing.assert_array_equal(moved.to_numpy(float), frame.to_numpy(float))
    arms = [(), KVMask("needle"), KVMask((15, 21), queries="after"), KVMask((0, 22), queries=(21,), on_empty="zero")]
    shifted = [(), KVMask("needle"), KVMask(shift((15, 21)), queries="after"),
               KVMask(shift((0, 22)), queries=(21 + pads,), on_empty="zero")]  # fmt: skip
    options = {"suffix": SUFFIX, "continuation": CONTINUED, "generate": 4}
    for mine, reference in zip(
        intervene(model, padded, shifted, **options), intervene(model, PROMPT, arms, **options), strict=True
    ):
        assert torch.equal(mine.logits, reference.logits) and mine.generated == reference.generated
        assert [q - pads for q in mine.positions] == reference.positions
        assert torch.equal(mine.receipt.retained, reference.receipt.retained)
        assert [(i, h, q - pads) for i, h, q in mine.receipt.silenced] == list(reference.receipt.silenced)
        for layer in LAYERS:
            for rows in ("attention", "own_attention", "corrected_attention"):
                ours, theirs = getattr(mine, rows)(layer), getattr(reference, rows)(layer)
                assert_close(ours[..., pads:], theirs, atol=1e-6, rtol=1e-5)
                assert bool((ours[..., :pads] == 0).all())


def test_pads_are_no_queries(tiny):
    padded = Prompt.from_ids([0, 0, *IDS], attention_mask=[0, 0] + [1] * N)
    assert observe(tiny("llama"), padded, slice(None)).queries == list(range(2, N + 2))
    with pytest.raises(PromptError, match=r"queries \[1\].* 2 … 27"):
        observe(tiny("llama"), padded, [1])
    with pytest.raises(InterventionError, match=r"query positions \[1\] are not allowed: give 2 … 27 or later"):
        intervene(tiny("llama"), padded, KVMask((2, 3), queries=[1]))
    with pytest.raises(InterventionError, match=r"\(1, 3\) does not fit the prompt: allowed is 2 ≤ start < stop ≤ 28"):
        intervene(tiny("llama"), padded, KVMask((1, 3)), suffix=2)


@every_family
def test_later_tokens_are_never_seen(family, tiny):
    """Full-row masks included: causal attention has no row that reads the future."""
    changed = [*IDS[:22], *catalogue.ids(5)[22:]]
    arms = [(), KVMask((3, 6), queries="after"), KVMask((0, 21), queries=(20, 19), on_empty="zero"),
            KVMask((0, N), queries=range(18, N), on_empty="keep_self")]  # fmt: skip
    first, second = (intervene(tiny(family), Prompt.from_ids(ids), arms, suffix=SUFFIX) for ids in (IDS, changed))
    for one, two in zip(first, second, strict=True):
        assert not one.logits.isnan().any() and not two.logits.isnan().any()
        assert torch.equal(one.logits[:4], two.logits[:4]) and not torch.equal(one.logits[4], two.logits[4])


@every_family
def test_chunks_change_nothing(family, tiny, monkeypatch):
    from kvprobe import attention

    ids = catalogue.ids(7, 90)
    prompt, arms = Prompt.from_ids(ids), [(), KVMask((30, 39)), KVMask((40, 55), heads=[1, 4], queries="after")]
    whole = intervene(tiny(family), prompt, arms, suffix=50, continuation=CONTINUED)
    monkeypatch.setattr(attention, "CHUNK_BYTES", {"cpu": 1, "default": 1})
    for mine, reference in zip(
        intervene(tiny(family), prompt, arms, suffix=50, continuation=CONTINUED), whole, strict=True
    ):
        assert_close(mine.logits, reference.logits, atol=2e-5, rtol=1e-6)
        assert mine.receipt.cells_reached == reference.receipt.cells_reached


def test_the_shape_of_the_answer_follows_the_shape_of_the_request(tiny):
    model, mask = tiny("llama"), KVMask("needle")
    single = intervene(model, PROMPT, mask, suffix=3)
    one, pair = intervene(model, PROMPT, [mask, (mask, KVMask((9, 11)))], suffix=3)
    assert torch.equal(single.logits, intervene(model, PROMPT, [mask], suffix=3)[0].logits)
    assert_close(one.logits, single.logits, atol=1e-5, rtol=1e-5)
    assert pair.receipt.cells_reached > one.receipt.cells_reached


def test_logits_are_those_of_the_suffix_even_where_a_mask_bites_earlier(tiny):
    early, clean = intervene(tiny("llama"), PROMPT, [KVMask((3, 5), queries="after"), ()], suffix=4)
    assert early.logits.shape[0] == clean.logits.shape[0] == 4
    assert early.positions == clean.positions == [22, 23, 24, 25]
    assert early.trace.queries == list(range(5, N))
    alone = intervene(tiny("llama"), PROMPT, KVMask((3, 5), queries="after"))
    assert alone.positions == list(range(5, N)) and torch.equal(alone.logits[-4:], early.logits)


def test_without_a_suffix_an_arm_that_touches_nothing_gives_the_last_row(tiny, plain):
    for arm in (KVMask([]), ()):
        out = intervene(tiny("llama"), PROMPT, [arm])[0]
        close(out.logits, plain("llama")(IDS).logits[-1:])
        assert out.positions == [N - 1]


def test_keep_trace_false_keeps_logits_and_receipt_only(tiny):
    out = intervene(tiny("llama"), PROMPT, KVMask("needle"), suffix=3, keep_trace=False)
    assert out.trace is None and out.receipt.cells_reached > 0
    with pytest.raises(InterventionError, match="keep_trace=True"):
        out.attention(0)


def test_batches_are_sized_by_tokens_and_by_logits():
    assert runs.batch_size(40, 320, "all") == runs.BATCH_TOKENS // 40
    assert runs.batch_size(10_000, 320, "all") == 1
    assert runs.batch_size(1, 1 << 40, "continuation") == 1
    assert runs.batch_size(10, 1 << 20, "all") < runs.batch_size(10, 1 << 20, "continuation")


def test_an_exception_in_a_run_leaves_the_model_as_it_was(tiny, plain, monkeypatch):
    from kvprobe import attention, engine

    model = tiny("llama")
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_two_part", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            intervene(model, PROMPT, KVMask("needle"), suffix=3)
    assert attention._ACTIVE.get() is None
    close(engine.prefill(model.twin, PROMPT.ids)[0].next_logits, plain("llama")(IDS).logits[-1])


def test_the_embedded_model_under_masks(smol):
    """A trained model, its strongest mask (the sink at position 0) included: fast path = hooks on all of its layers."""
    text = (
        "Once upon a time there was a small town by the sea. The secret number is 4172. " * 6 + "The secret number is"
    )
    prompt = Prompt.from_text(smol, text)
    n = len(prompt)
    assert 100 < n < 300
    masks = [
        KVMask((0, 1)),
        KVMask((n // 3, n // 3 + 9)),
        KVMask((20, 60), heads={3: (1, 8), 20: (4,)}),
        KVMask((9, 30), beta=2.0),
    ]
    outs = intervene(smol, prompt, masks, suffix=6, generate=4)
    for mask, out in zip(masks, outs, strict=True):
        with torch.no_grad():
            hooked = smol.bridge.run_with_hooks(
                prompt.ids[None], fwd_hooks=mask.fwd_hooks(smol, prompt, 6), prepend_bos=False
            )[0, -6:]
        assert_close(out.logits, hooked, atol=5e-4, rtol=0)
        assert out.generated[0] == int(hooked[-1].argmax())
    assert math.isclose(outs[0].receipt.smallest_retained, _own_retained(outs[0]), rel_tol=1e-4)
    assert outs[0].receipt.smallest_retained < 0.02


def _own_retained(out):
    rows = torch.stack([view.logits for view in out.trace.layers()]).double().softmax(-1)
    return float(rows[..., 1:].sum(-1).min())

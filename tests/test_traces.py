"""Traces: layers worked out one at a time, prefixes taken from them, and files that come back as they went."""

import json
import math
import types

import catalogue
import pytest
import tiny as families
import torch
from catalogue import SUFFIX, N
from torch.testing import assert_close

from kvprobe import KVMask, Prompt, Trace, intervene, observe, prefill, span_stats
from kvprobe.errors import DataError, RecordError, TheoryError
from kvprobe.traces import LayerView

every_family = pytest.mark.parametrize("family", families.FAMILIES)
PROMPT = Prompt.from_ids(catalogue.ids(), {"needle": (4, 7)})
PADDED = Prompt.from_ids([0, 0, 0, *PROMPT.ids.tolist()], {"needle": (7, 10)}, attention_mask=[0] * 3 + [1] * N)


@every_family
def test_a_layer_is_what_the_theory_reads(family, tiny):
    model = tiny(family)
    trace = observe(model, PROMPT, [5, 25])
    kv_heads = 6 if family == "gpt2" else 2
    for index, view in enumerate(trace.layers()):
        assert view.index == index
        assert view.logits.shape == (6, 2, N) and view.logits.dtype == torch.float32
        assert view.values.shape == (kv_heads, N, 8) and view.w_o.shape == (6, 8, 48)
        assert view.w_o.data_ptr() == model.w_o(index).data_ptr()
        assert view.queries.tolist() == trace.queries == [5, 25] and view.queries.dtype == torch.int64
        assert (view.sink is not None) == (family == "gpt_oss")
        assert not any(t.requires_grad for t in (view.logits, view.values, view.w_o, view.attention))
        sums = view.attention.sum(-1)
        if view.sink is None:
            assert_close(sums, torch.ones(6, 2))
        else:
            assert bool((sums < 1).all()) and not view.sink.requires_grad


def test_layers_are_streamed_not_kept(tiny):
    trace = observe(tiny("llama"), PROMPT, [5, 25])
    assert isinstance(trace.layers(), types.GeneratorType)
    first = trace.layer(1).logits
    first.zero_()
    assert bool((trace.layer(1).logits != 0).any())


@every_family
@pytest.mark.parametrize("prompt", [PROMPT, PADDED], ids=["plain", "padded"])
@pytest.mark.parametrize(
    ("rows", "which"),
    [
        (slice(2, 4), [2, 3]),
        (slice(0, 1), [0]),
        (slice(-2, None), [4, 5]),
        ([1, 5], [1, 5]),
        (range(3), [0, 1, 2]),
        ([-1], [5]),
        (slice(None), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_some_rows_are_a_slice_of_all(family, prompt, rows, which, tiny, monkeypatch):
    """Up to the rounding of a lower matrix product, and only the chosen rows' logits are ever made."""
    from kvprobe import traces as module

    trace = observe(tiny(family), prompt, [prompt.pad + q for q in (0, 3, 5, 9, 20, 25)])
    whole, made, real = [trace.layer(index) for index in range(3)], [], module.layer_logits
    monkeypatch.setattr(module, "layer_logits", lambda query, *more: made.append(query.shape[1]) or real(query, *more))
    for index, view in enumerate(whole):
        part = trace.layer(index, rows=rows)
        assert torch.equal(part.logits.isneginf(), view.logits[:, which].isneginf())
        assert_close(part.logits, view.logits[:, which], rtol=1e-6, atol=5e-6)
        assert_close(part.attention, view.attention[:, which], rtol=1e-5, atol=1e-7)
        assert torch.equal(part.queries, view.queries[which]) and torch.equal(part.values, view.values)
        assert part.w_o.data_ptr() == view.w_o.data_ptr() and part.index == index
    assert made == [len(which)] * 3


@pytest.mark.parametrize("rows", [[], slice(2, 2), [2], [-3], slice(5, 9)])
def test_rows_that_do_not_exist(rows, tiny):
    with pytest.raises(TheoryError, match=r"rows=.*; allowed: one or more of the 2 observed rows, by index"):
        observe(tiny("llama"), PROMPT, [5, 25]).layer(0, rows=rows)


@pytest.mark.parametrize("index", [-1, 3])
def test_a_layer_that_does_not_exist(index, tiny):
    with pytest.raises(TheoryError, match=rf"layer {index} does not exist: the trace has layers 0 … 2"):
        observe(tiny("llama"), PROMPT).layer(index)


@pytest.mark.parametrize("sink", [None, -3.0, 40.0])
def test_rows_are_softmax_with_an_optional_sink(sink):
    logits = torch.tensor([[[0.5, -1.0, -torch.inf], [3e4, 3e4 - 1, 2e4], [-torch.inf] * 3]])
    one = torch.ones(1, 1, 1)
    learned = None if sink is None else torch.tensor([sink])
    rows = LayerView(0, logits, one, one, learned, torch.arange(3)).attention
    for row, mine in zip(logits[0].tolist(), rows[0].tolist(), strict=True):
        everything = row + ([] if sink is None else [sink])
        top = max(everything)
        total = sum(math.exp(x - top) for x in everything) if top > -math.inf else 1.0
        assert mine == pytest.approx([math.exp(x - top) / total if x > -math.inf else 0.0 for x in row], abs=1e-7)


@every_family
@pytest.mark.parametrize("prompt", [PROMPT, PADDED], ids=["plain", "padded"])
def test_a_traces_prefix_is_a_prefill(family, prompt, tiny):
    trace = observe(tiny(family), prompt)
    for length in (1, 11, N):
        mine, reference = trace.prefix(length), prefill(tiny(family), prompt, length)
        assert torch.equal(mine.ids, reference.ids) and len(mine) == length
        for (keys, values), (theirs, others) in zip(mine.layers, reference.layers, strict=True):
            assert_close(keys, theirs, atol=5e-5, rtol=1e-5)
            assert_close(values, others, atol=5e-5, rtol=1e-5)
    for length in (0, N + 1):
        with pytest.raises(TheoryError, match=f"no contiguous prefix of {length} tokens"):
            trace.prefix(length)


def traces(model, which):
    """A plain one, one after left pads, and the rows of a masked arm behind a shared prefix."""
    return {
        "observed": lambda: observe(model, PROMPT, [5, 25]),
        "padded": lambda: observe(model, PADDED, slice(-3, None)),
        "an arm": lambda: intervene(model, PROMPT, [(), KVMask((9, 15))], suffix=SUFFIX)[1].trace,
    }[which]()


@every_family
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("which", ["observed", "padded", "an arm"])
def test_a_file_gives_back_what_was_saved(family, which, weights, tiny, tmp_path):
    model = tiny(family)
    trace = traces(model, which)
    path = trace.save(tmp_path / "rows.safetensors", weights=weights)
    assert path == tmp_path / "rows.safetensors" and list(tmp_path.iterdir()) == [path]
    back = Trace.load(path, None if weights else model)
    assert torch.equal(back.ids, trace.ids) and back.queries == trace.queries and back.pad == trace.pad
    assert back.spans == dict(trace.spans) and back.meta == trace.meta
    assert (back.n, back.n_layers, back.n_heads) == (trace.n, 3, 6)
    for mine, reference in zip(back.layers(), trace.layers(), strict=True):
        for name in ("logits", "values", "w_o", "queries"):
            assert torch.equal(getattr(mine, name), getattr(reference, name))
        assert (mine.sink is None) == (reference.sink is None)
        assert torch.equal(mine.attention, reference.attention)
    spans = [(trace.pad, trace.pad + 2), (trace.pad + 4, trace.pad + 20)]
    assert span_stats(back, spans).equals(span_stats(trace, spans))


def test_a_file_without_weights_needs_the_model(tiny, tmp_path):
    path = observe(tiny("llama"), PROMPT).save(tmp_path / "t", weights=False)
    with pytest.raises(DataError, match=r"saved without W_O: give Trace.load\(path, model\)"):
        Trace.load(path)


def test_saving_twice_replaces(tiny, tmp_path):
    path = tmp_path / "t"
    observe(tiny("llama"), PROMPT, [3]).save(path)
    observe(tiny("llama"), PROMPT, [7]).save(path)
    assert Trace.load(path).queries == [7] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, RuntimeError])
@pytest.mark.parametrize("existing", [True, False])
def test_an_interrupted_save_leaves_no_file_and_spares_the_old_one(error, existing, tiny, tmp_path, monkeypatch):
    import safetensors.torch

    path = tmp_path / "t"
    if existing:
        observe(tiny("llama"), PROMPT, [3]).save(path)
    before = path.read_bytes() if existing else None

    def half(tensors, target, metadata):
        target.write_bytes(b"half a file")
        raise error("no space left")

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    with pytest.raises(RecordError if error is OSError else error):
        observe(tiny("llama"), PROMPT, [7]).save(path)
    assert list(tmp_path.iterdir()) == ([path] if existing else [])
    assert not existing or path.read_bytes() == before


def test_a_folder_that_is_not_there_is_one_line(tiny, tmp_path):
    with pytest.raises(RecordError, match=r"cannot write the trace .*writable folder") as caught:
        observe(tiny("llama"), PROMPT).save(tmp_path / "missing" / "t")
    assert "\n" not in str(caught.value)


@pytest.fixture
def saved(tiny, tmp_path):
    return observe(tiny("gpt_oss"), PROMPT, [25]).save(tmp_path / "t")


def rewrite(path, change=None, drop=None):
    """Write the file again with another header, or without one tensor."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(str(path), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name != drop}  # noqa: SIM118
        header = json.loads(file.metadata()["kvprobe"])
    text = change if isinstance(change, str) else json.dumps(change(header) if change else header)
    save_file(tensors, path, metadata={"kvprobe": text})


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 500, 0.5, 0.999])
def test_a_truncated_file_is_one_line(saved, keep):
    whole = saved.read_bytes()
    saved.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    refused(saved, "is not a readable trace")


@pytest.mark.parametrize("noise", [b"not a trace at all, just text", b"\x00" * 64, b"\xff" * 64])
def test_a_file_of_something_else_is_one_line(saved, noise):
    saved.write_bytes(noise)
    refused(saved, "is not a readable trace")


def test_no_file_is_one_line(tmp_path):
    refused(tmp_path / "nothing", "is not a readable trace")
    refused(tmp_path, "is not a readable trace")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda header: None, r"not a kvprobe trace \(format 1\)"),
        (lambda header: [1], "not a kvprobe trace"),
        (lambda header: header | {"format": 2}, "not a kvprobe trace"),
        (lambda header: {}, "not a kvprobe trace"),
        ("{not json", "not a readable trace"),
        (lambda header: {"format": 1, "weights": True}, "incomplete trace: KeyError 'specs'"),
        (lambda header: header | {"specs": [[1.0]] * 3}, "incomplete trace: ValueError"),
        (lambda header: header | {"specs": 5}, "incomplete trace: TypeError"),
        (lambda header: header | {"spans": {"a": 3}}, "incomplete trace: TypeError"),
    ],
)
def test_another_header_is_one_line(saved, change, says):
    rewrite(saved, change)
    refused(saved, says)


@pytest.mark.parametrize("name", ["ids", "queries", "0.query", "2.key", "1.value", "1.w_o"])
def test_a_missing_tensor_is_one_line(saved, name):
    rewrite(saved, drop=name)
    refused(saved, f"incomplete trace: KeyError '{name}'")


def test_other_tensors_are_not_a_trace(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(3)}, tmp_path / "w")
    refused(tmp_path / "w", r"is not a kvprobe trace \(format 1\)")


def refused(path, says):
    with pytest.raises(DataError, match=says) as caught:
        Trace.load(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_trace_without_weights_refuses_another_models(tiny, tmp_path):
    trace = observe(tiny("llama"), PROMPT, [-1])
    path = trace.save(tmp_path / "t.safetensors", weights=False)
    assert torch.equal(Trace.load(path, tiny("llama")).output(1), tiny("llama").w_o(1))
    for other in (tiny("gpt2"), 3, None):
        with pytest.raises(DataError, match=r"another model|with the model it was made with"):
            Trace.load(path, other)

"""Receipts: they hold for every arm, count what loops count, and fail when the attention is tampered with."""

from dataclasses import replace

import catalogue
import pytest
import tiny as families
import torch
from catalogue import ARMS, CONTINUED, HEADS, LAYERS, SUFFIX, N
from torch.testing import assert_close

from kvprobe import KVMask, Prompt, attention, chunkbias, intervene
from kvprobe.errors import ReceiptError
from kvprobe.interventions.plan import Scene, compile_arms
from kvprobe.receipts import Receipt, expected_cells

every_family = pytest.mark.parametrize("family", families.FAMILIES)
PROMPT = Prompt.from_ids(catalogue.ids())
STEPS = 4


@pytest.fixture(scope="module")
def outcomes(tiny):
    """Family → every arm of the catalogue with a continuation and greedy steps."""
    done = {}

    def run(family):
        if family not in done:
            options = {"suffix": SUFFIX, "continuation": CONTINUED, "generate": STEPS}
            done[family] = dict(zip(ARMS, intervene(tiny(family), PROMPT, catalogue.arms(), **options), strict=True))
        return done[family]

    return run


@every_family
@pytest.mark.parametrize("name", ARMS)
def test_counts_are_those_of_loops(family, name, outcomes, plain):
    """Rows that ran: from the first affected one over the continuation, and then one for each token decoded from."""
    out, receipt = outcomes(family)[name], outcomes(family)[name].receipt
    steps = receipt.retained.shape[-1] - len(out.trace.queries)
    assert 0 <= steps <= STEPS - 1
    rows = [*out.trace.queries, *range(N, N + steps)]
    table = catalogue.table(name, total=N + STEPS)
    cells, layers = 0, []
    for layer in LAYERS:
        seen = plain(family).visible(layer, N + STEPS)
        cells += sum(int(((table[layer][:, row] < 0) & seen[row]).sum()) for row in rows)
        named = any(layer in cutout.layers and cutout.heads.get(layer) for _, cutout in ARMS[name])
        layers += [layer] if named else []
    assert receipt.cells_expected == receipt.cells_reached == cells
    assert receipt.layers_named == receipt.layers_fired == tuple(layers)
    assert receipt.masked_weight == 0
    assert receipt.verify("again") is receipt


@every_family
@pytest.mark.parametrize("name", ARMS)
def test_retained_mass_is_what_the_own_unmasked_row_keeps(family, name, outcomes):
    """R = Σ N A⁺ + sink in fp64, from the arm's own logits before its bias."""
    out = outcomes(family)[name]
    table, queries = catalogue.table(name), out.trace.queries
    for view in out.trace.layers():
        logits = view.logits.double()
        if view.sink is not None:
            logits = torch.cat([logits, view.sink.double()[:, None, None].expand(-1, len(queries), 1)], -1)
        row = logits.softmax(-1)
        weight = table[view.index][:, queries].double().exp()
        kept = (row[..., : out.trace.n] * weight).sum(-1) + row[..., out.trace.n :].sum(-1)
        mine = out.receipt.retained[view.index][:, : len(queries)].double()
        assert_close(mine, kept, atol=2e-6, rtol=2e-4)
        untouched = (weight == 1).all(-1)
        assert bool((mine[untouched] == 1).all())


def test_retained_mass_is_accurate_where_almost_nothing_is_left(tiny, tiny_folder, tmp_path):
    """Queries fifteen times larger make rows whose masked key held all but 1e-6 … 1e-30 of the attention."""
    from transformers import AutoModelForCausalLM

    from kvprobe import models

    hf = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"))
    with torch.no_grad():
        hf.model.layers[0].self_attn.q_proj.weight.mul_(15)
    hf.save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    model, counted = models.load(tmp_path), 0
    for key in range(17):
        out = intervene(model, PROMPT, KVMask((key, key + 1), layers=0), suffix=SUFFIX)
        logits = out.trace.layer(0).logits.double()
        everything = logits.logsumexp(-1)
        logits[..., key] = -torch.inf
        kept = (logits.logsumexp(-1) - everything).exp()
        mine = out.receipt.retained[0].double()
        assert_close(mine, kept, atol=0, rtol=2e-4)
        counted += int(((kept < 1e-6) & (kept > 1e-12)).sum())
        assert out.receipt.low_retained == int((mine < 1e-6).sum())
        assert out.receipt.smallest_retained == float(out.receipt.retained.min())
    assert counted > 5


def call(tiny, mask, **options):
    return intervene(tiny("llama"), PROMPT, [(), mask], suffix=SUFFIX, **options)


MASK = KVMask((9, 15))


@pytest.mark.parametrize("beta", [float("inf"), 1.0, 1e-3])
def test_a_dropped_bias_is_caught(tiny, monkeypatch, beta):
    monkeypatch.setattr(chunkbias._Side, "add", lambda self, part, raw: None)
    with pytest.raises(ReceiptError, match=r"arm 1: .*the bias met 0 visible cells, expected 864") as caught:
        call(tiny, KVMask((9, 15), beta=beta))
    assert ("a masked key kept weight" in str(caught.value)) == (beta == float("inf"))


def test_a_bias_that_is_not_quite_infinite_is_caught(tiny, monkeypatch):
    weak = lambda self, part, raw: part.scatter_(-1, self._spread(part), raw + self.bias.clamp_min(-20))  # noqa: E731
    monkeypatch.setattr(chunkbias._Side, "add", weak)
    with pytest.raises(ReceiptError, match=r"a masked key kept weight .*; the bias met 0 visible cells, expected 864"):
        call(tiny, MASK)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_skipped_layer_is_caught(tiny, monkeypatch, layer):
    two_part = attention._two_part

    def skip(query, key, value, spec, run, index, arms, edits):
        return two_part(query, key, value, spec, run, index, {} if index == layer else arms, edits)

    monkeypatch.setattr(attention, "_two_part", skip)
    rest = [index for index in LAYERS if index != layer]
    with pytest.raises(ReceiptError) as caught:
        call(tiny, MASK)
    assert f"bias applied on layers {rest}, asked for [0, 1, 2]" in str(caught.value)


def test_a_layer_skipped_in_a_decoding_step_is_caught(tiny, monkeypatch):
    two_part = attention._two_part

    def skip(query, key, value, spec, run, index, arms, edits):
        some = {} if run.start == N + 1 and index == 2 else arms
        return two_part(query, key, value, spec, run, index, some, edits)

    monkeypatch.setattr(attention, "_two_part", skip)
    assert len(call(tiny, MASK, generate=2)) == 2
    with pytest.raises(ReceiptError, match=r"bias applied on layers \[0, 1\], asked for \[0, 1, 2\]"):
        call(tiny, MASK, generate=4)


@pytest.mark.parametrize("what", ["a head", "a row", "a key", "the prefix"])
def test_a_part_that_is_left_out_is_caught(tiny, monkeypatch, what):
    build = chunkbias.ChunkBias.build

    def tampered(*args):
        bias = build(*args)
        far = bias.far
        if what == "the prefix":
            return replace(bias, far=None)
        values = far.bias.expand(-1, 2, 3, len(args[2]), -1).clone()
        index = {"a head": (slice(None), 1, 2), "a row": (..., 3, slice(None)), "a key": (..., 0)}[what]
        values[index] = 0
        return replace(bias, far=replace(far, bias=values))

    monkeypatch.setattr(chunkbias.ChunkBias, "build", tampered)
    with pytest.raises(ReceiptError, match=r"the bias met \d+ visible cells, expected 864"):
        call(tiny, MASK)


def test_a_mask_that_reaches_too_far_is_caught(tiny, monkeypatch):
    build = chunkbias.ChunkBias.build

    def tampered(*args):
        bias = build(*args)
        return replace(bias, far=replace(bias.far, real=torch.ones_like(bias.far.real), bias=bias.far.bias - 1))

    monkeypatch.setattr(chunkbias.ChunkBias, "build", tampered)
    with pytest.raises(ReceiptError, match=r"arm 0: .* visible cells, expected 0"):
        call(tiny, MASK)


def test_nan_is_caught(tiny, monkeypatch):
    apply = chunkbias.ChunkBias.apply
    monkeypatch.setattr(chunkbias.ChunkBias, "apply", lambda *a: (apply(*a)[0] * torch.nan, *apply(*a)[1:]))
    with pytest.raises(ReceiptError, match="a retained mass is NaN"):
        call(tiny, MASK)


def test_nothing_is_returned_when_one_arm_of_many_fails(tiny, monkeypatch):
    add = chunkbias._Side.add
    drop = lambda self, part, raw: add(self, part, torch.where(self.bias < -1e9, raw - self.bias, raw))  # noqa: E731
    monkeypatch.setattr(chunkbias._Side, "add", drop)
    with pytest.raises(ReceiptError, match="arm 2"):
        intervene(tiny("llama"), PROMPT, [(), KVMask((9, 15), beta=0.5), MASK], suffix=SUFFIX)


def test_unseen_keys_are_reported_and_change_no_bit(tiny):
    clean, unseen, partly = intervene(tiny("mistral"), PROMPT, [(), KVMask((3, 6)), KVMask((12, 16))], suffix=SUFFIX)
    assert unseen.receipt.unseen == {0: 3, 1: 3, 2: 3} and unseen.receipt.cells_reached == 0
    assert torch.equal(unseen.logits, clean.logits) and bool((unseen.receipt.retained == 1).all())
    assert unseen.receipt.layers_fired == LAYERS
    assert partly.receipt.unseen == {0: 2, 1: 2, 2: 2} and partly.receipt.cells_reached > 0
    mixed = intervene(tiny("gemma2"), PROMPT, KVMask((3, 6)), suffix=SUFFIX)
    assert mixed.receipt.unseen == {0: 3, 2: 3}


def test_keys_that_only_generated_tokens_see_are_seen_when_there_are_any(tiny):
    mask = KVMask((22, 25), queries="generated")
    assert intervene(tiny("llama"), PROMPT, mask).receipt.unseen == {0: 3, 1: 3, 2: 3}
    assert intervene(tiny("llama"), PROMPT, mask, generate=1).receipt.unseen == {0: 3, 1: 3, 2: 3}
    for options in ({"generate": 3}, {"continuation": CONTINUED}):
        receipt = intervene(tiny("llama"), PROMPT, mask, **options).receipt
        assert receipt.unseen == {} and receipt.cells_reached > 0
    window = intervene(tiny("mistral"), PROMPT, KVMask((20, 24), queries="generated"), generate=3).receipt
    assert window.unseen == {0: 2, 1: 2, 2: 2}


def test_silenced_rows_are_listed(tiny):
    mask = KVMask((0, 22), heads={1: (3, 5)}, queries=(21,), on_empty="zero")
    receipt = intervene(tiny("llama"), PROMPT, mask).receipt
    assert sorted(receipt.silenced) == [(1, 3, 21), (1, 5, 21)]
    assert float(receipt.retained[1, 3, 0]) == 0 and receipt.smallest_retained == 0
    assert receipt.to_dict()["silenced_rows"] == 2


RECEIPT = Receipt((0, 2), (0, 2), 0.0, 12, 12, torch.tensor([1.0, 0.5, 1e-7]), {0: 2, 2: 1}, ((0, 1, 5),))


def test_a_receipt_in_a_table():
    assert RECEIPT.verify("this") is RECEIPT
    assert RECEIPT.low_retained == 1
    assert RECEIPT.to_dict() == {
        "layers": 2,
        "masked_weight": 0.0,
        "cells": 12,
        "unseen_keys": 3,
        "silenced_rows": 1,
        "smallest_retained": pytest.approx(1e-7),
        "low_retained_rows": 1,
    }
    empty = replace(RECEIPT, retained=torch.zeros(0))
    assert empty.smallest_retained == 1.0 and empty.low_retained == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers_fired": (0,)}, r"bias applied on layers \[0\], asked for \[0, 2\]"),
        ({"masked_weight": 1e-30}, "a masked key kept weight 1e-30"),
        ({"masked_weight": float("nan")}, "a masked key kept weight nan"),
        ({"cells_reached": 11}, "the bias met 11 visible cells, expected 12"),
        ({"cells_reached": 13}, "the bias met 13 visible cells, expected 12"),
        ({"retained": torch.tensor([1.0, float("nan")])}, "a retained mass is NaN"),
    ],
)
def test_a_receipt_says_what_does_not_hold(change, says):
    with pytest.raises(ReceiptError, match=says) as caught:
        replace(RECEIPT, **change).verify("arm 4")
    assert str(caught.value).startswith("arm 4: the receipt does not hold: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("window", [None, 5])
def test_expected_cells_are_counted_from_positions_alone(window):
    scene = Scene(N, SUFFIX, 3, len(HEADS), (window,) * 3, True)
    plan = compile_arms([[], [KVMask((9, 15), heads=[1, 2])], [KVMask((9, 21), layers=[0, 2])]], scene)
    positions = torch.arange(18, N)
    sees = [sum(q - (window or N) < k <= q for k in range(9, 15)) for q in positions.tolist()]
    assert expected_cells(plan, 0, positions, (window,) * 3, 6) == 0
    assert expected_cells(plan, 1, positions, (window,) * 3, 6) == 3 * 2 * sum(sees)
    sees = [sum(q - (window or N) < k <= q for k in range(9, 21)) for q in positions.tolist()]
    assert expected_cells(plan, 2, positions, (window,) * 3, 6) == 2 * 6 * sum(sees)

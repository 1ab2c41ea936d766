"""KVMask against plain transformers with a 4-D mask, and against a decoder without cache."""

import math

import catalogue
import numpy as np
import pytest
import tiny as families
import torch
from catalogue import ARMS, CONTINUED, HEADS, LAYERS, SUFFIX, N
from torch.testing import assert_close

from kvprobe import KVMask, Prompt, intervene, observe
from kvprobe.errors import InterventionError, PromptError

every_family = pytest.mark.parametrize("family", families.FAMILIES)
PROMPT = Prompt.from_ids(catalogue.ids(), {"needle": (4, 7), "other": (10, 12)})
TOKENS = [*PROMPT.ids.tolist(), *CONTINUED]


@pytest.fixture(scope="module")
def outcomes(tiny):
    """Family → every arm of the catalogue, from one call."""

    def run(family):
        if family not in done:
            done[family] = dict(zip(ARMS, call(tiny(family), catalogue.arms()), strict=True))
        return done[family]

    done = {}
    return run


def call(model, arms, **options):
    return intervene(model, PROMPT, arms, **{"suffix": SUFFIX, "continuation": CONTINUED} | options)


@every_family
@pytest.mark.parametrize("name", ARMS)
def test_equals_transformers_with_a_4d_mask(family, name, outcomes, plain):
    out, reference = outcomes(family)[name], plain(family)(TOKENS, catalogue.table(name))
    assert out.positions == list(range(N - SUFFIX, N + len(CONTINUED)))
    assert_close(out.logits, reference.logits[N - SUFFIX :], atol=1e-4, rtol=1e-5)
    for layer in LAYERS:
        rows = reference.attention[layer][:, out.trace.queries]
        assert_close(out.attention(layer), rows, atol=1e-5, rtol=1e-4)


@every_family
def test_a_mask_changes_what_it_should(family, outcomes, plain):
    """The oracle comparison is not one of zeros with zeros: every arm that meets a visible key moves the logits."""
    clean = plain(family)(TOKENS).logits[N - SUFFIX :]
    moved = {name for name, out in outcomes(family).items() if float((out.logits - clean).abs().max()) > 0.01}
    seen = {name for name, out in outcomes(family).items() if out.receipt.cells_reached}
    # Where every layer has a window of 5, what happens before position 10 cannot reach the suffix in 3 layers.
    lost = {"position 0 for everything after it", "after a span", "three positions", "the whole beginning, zero"}
    assert moved == seen - (lost if family == "mistral" else set())
    assert len(moved) > 20 and "clean" not in moved


@every_family
@pytest.mark.parametrize("batch", [1, 5])
def test_batch_equals_one_by_one(family, batch, outcomes, tiny):
    for name, out in zip(ARMS, call(tiny(family), catalogue.arms(), batch=batch), strict=True):
        assert_close(out.logits, outcomes(family)[name].logits, atol=5e-5, rtol=1e-5)
        assert out.receipt.cells_reached == outcomes(family)[name].receipt.cells_reached


@every_family
def test_the_order_of_arms_changes_nothing(family, outcomes, tiny):
    backwards = call(tiny(family), catalogue.arms()[::-1])[::-1]
    for out, first in zip(backwards, outcomes(family).values(), strict=True):
        assert_close(out.logits, first.logits, atol=5e-5, rtol=1e-5)


@every_family
@pytest.mark.parametrize("suffix", [SUFFIX, N])
def test_the_identity_is_the_clean_arm_bit_for_bit(family, suffix, tiny):
    arms = [
        (),
        KVMask([]),
        KVMask((14, 17)),
        (KVMask([]),) * 2,
    ]
    clean, identity, masked, twice = call(tiny(family), arms, suffix=suffix)
    for out in (identity, twice):
        assert torch.equal(out.logits, clean.logits)
        assert out.receipt.cells_expected == 0 and out.receipt.layers_named == ()
        for layer in LAYERS:
            assert torch.equal(out.attention(layer), clean.attention(layer))
    assert not torch.equal(masked.logits, clean.logits)


@pytest.mark.parametrize("given", [{"heads": []}, {"layers": []}, {"heads": {}}, {"heads": {0: []}}], ids=str)
def test_a_mask_without_heads_is_a_mistake_not_the_identity(given, tiny):
    with pytest.raises(InterventionError, match="name no head") as caught:
        call(tiny("llama"), KVMask((14, 17), **given))
    assert "\n" not in str(caught.value)


@every_family
def test_rows_before_the_first_affected_one_are_clean_bit_for_bit(family, tiny):
    clean, masked = call(tiny(family), [(), KVMask((18, 20), queries=(22, 24))])
    assert torch.equal(masked.logits[:4], clean.logits[:4])
    assert not torch.equal(masked.logits[4], clean.logits[4])


@every_family
def test_rows_before_the_first_affected_one_are_not_run(family, tiny, monkeypatch):
    from kvprobe import engine

    lengths, forward = [], engine.forward
    monkeypatch.setattr(
        engine, "forward", lambda twin, ids, *a, **k: lengths.append(ids.shape) or forward(twin, ids, *a, **k)
    )
    out = intervene(tiny(family), PROMPT, [KVMask((9, 12), queries="after")])[0]
    assert lengths == [(1, 12), (1, N - 12)]
    assert out.positions == list(range(12, N))


@every_family
def test_other_heads_keep_every_bit_at_the_first_masked_layer(family, tiny):
    model = tiny(family)
    seen = {}
    handles = [
        module.o_proj.register_forward_pre_hook(lambda m, args, layer=layer: seen.__setitem__(layer, args[0]))
        if hasattr(module, "o_proj")
        else module.c_proj.register_forward_pre_hook(lambda m, args, layer=layer: seen.__setitem__(layer, args[0]))
        for layer, module in enumerate(_attention_modules(model))
    ]
    try:
        clean, masked = call(model, [(), KVMask((14, 18), layers=[1, 2], heads=[2])])
    finally:
        for handle in handles:
            handle.remove()
    first, second, third = (seen[layer].unflatten(-1, (len(HEADS), -1)) for layer in LAYERS)
    others = [head for head in HEADS if head != 2]
    assert torch.equal(first[0], first[1])
    assert torch.equal(second[0][:, others], second[1][:, others]) and not torch.equal(second[0], second[1])
    assert not torch.equal(third[0][:, others], third[1][:, others])
    assert torch.equal(masked.attention(1)[others], clean.attention(1)[others])


def _attention_modules(model):
    return [
        m for m in model.twin.modules() if hasattr(m, "layer_idx") and (hasattr(m, "o_proj") or hasattr(m, "c_proj"))
    ]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_permuting_query_heads_within_groups_permutes_the_results(family, tiny, tiny_folder, tmp_path):
    """Head h reads kv head h // G. Head i of the permuted model is head order[i] of the first one."""
    from transformers import AutoModelForCausalLM

    from kvprobe import models

    order = [2, 0, 1, 4, 5, 3]
    hf = AutoModelForCausalLM.from_pretrained(tiny_folder(family))
    with torch.no_grad():
        for block in hf.model.layers:
            attn = block.self_attn
            attn.q_proj.weight.copy_(attn.q_proj.weight.unflatten(0, (6, -1))[order].flatten(0, 1))
            attn.o_proj.weight.copy_(attn.o_proj.weight.unflatten(1, (6, -1))[:, order].flatten(1, 2))
            if attn.q_proj.bias is not None:
                attn.q_proj.bias.copy_(attn.q_proj.bias.unflatten(0, (6, -1))[order].flatten(0, 1))
            if hasattr(attn, "sinks"):
                attn.sinks.copy_(attn.sinks[order])
    hf.save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    permuted = models.load(tmp_path)
    for i, head in enumerate(order):
        mine, theirs = (call(m, KVMask((14, 17), heads=h)) for m, h in ((permuted, i), (tiny(family), head)))
        assert_close(mine.logits, theirs.logits, atol=5e-5, rtol=1e-5)
        assert_close(mine.receipt.retained, theirs.receipt.retained[:, order], atol=1e-5, rtol=1e-5)
    wrong = call(permuted, KVMask((14, 17), heads=0)), call(tiny(family), KVMask((14, 17), heads=0))
    assert float((wrong[0].logits - wrong[1].logits).abs().max()) > 1e-3
    rows = observe(permuted, PROMPT).layer(1)
    first = observe(tiny(family), PROMPT).layer(1)
    assert_close(rows.attention, first.attention[order], atol=1e-5, rtol=1e-4)
    assert_close(rows.values, first.values, atol=1e-5, rtol=1e-4)


GREEDY = ("clean", "in the prefix", "across the border", "own rows", "heads by layer", "after a span", "two masks",
          "generated tokens only", "three positions", "finite", "everything of one head, zero")  # fmt: skip


@pytest.mark.slow
@every_family
def test_greedy_decoding_equals_a_loop_without_cache(family, tiny, plain):
    steps, eos = 7, {tiny(family).tokenizer.eos_token_id}
    prompt = Prompt.from_ids(catalogue.ids(9))
    outs = intervene(tiny(family), prompt, [catalogue.arm(name) for name in GREEDY], suffix=SUFFIX, generate=steps)
    texts = set()
    for name, out in zip(GREEDY, outs, strict=True):
        slow = plain(family).greedy(prompt.ids.tolist(), steps, lambda total, n=name: catalogue.table(n, total), eos)
        assert out.generated == slow
        texts.add(tuple(slow))
    assert len(texts) > 3


@every_family
def test_forced_and_free_answers_come_from_one_call(family, tiny):
    model, arms = tiny(family), [catalogue.arm(name) for name in GREEDY]
    both = intervene(model, PROMPT, arms, suffix=SUFFIX, continuation=CONTINUED, generate=5)
    forced = intervene(model, PROMPT, arms, suffix=SUFFIX, continuation=CONTINUED)
    free = intervene(model, PROMPT, arms, suffix=SUFFIX, generate=5)
    for one, first, second in zip(both, forced, free, strict=True):
        assert torch.equal(one.logits, first.logits) and first.generated == []
        assert one.generated == second.generated and len(one.generated) == 5
        assert_close(one.logits[:SUFFIX], second.logits, atol=5e-5, rtol=1e-5)
        for layer in LAYERS:
            assert torch.equal(one.attention(layer), first.attention(layer))


def test_decoding_stops_before_an_end_of_sequence_token(tiny, monkeypatch):
    model = tiny("llama")
    free = intervene(model, PROMPT, [(), KVMask((14, 17))], suffix=SUFFIX, generate=6)
    stop = free[0].generated[5]
    before = [text[: text.index(stop)] if stop in text else text for text in (out.generated for out in free)]
    for eos in (stop, [stop, 2]):
        monkeypatch.setattr(model.twin.generation_config, "eos_token_id", eos)
        stopped = intervene(model, PROMPT, [(), KVMask((14, 17))], suffix=SUFFIX, generate=6)
        assert [out.generated for out in stopped] == before
    assert len(before[0]) < 6 and before[0] == free[0].generated[: len(before[0])]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"keys": "needle"}, {"keys": (4, 7)}),
        ({"keys": ["needle", "other"]}, {"keys": [(4, 7), (10, 12)]}),
        ({"keys": ["needle", (10, 12)]}, {"keys": [(4, 7), (10, 12)]}),
        ({"keys": [4, 7]}, {"keys": [(4, 7)]}),
        ({"keys": (np.int64(4), np.int64(7))}, {"keys": [(4, 7)]}),
        ({"layers": np.int64(1)}, {"layers": [1]}),
        ({"layers": np.array([0, 2])}, {"layers": [0, 2]}),
        ({"layers": range(2)}, {"layers": [0, 1]}),
        ({"heads": np.int64(4)}, {"heads": [4]}),
        ({"heads": np.array([4, 5])}, {"heads": [4, 5]}),
        ({"heads": torch.tensor([4, 5])}, {"heads": [4, 5]}),
        ({"heads": [4, 4]}, {"heads": [4]}),
        ({"heads": {1: 3}}, {"layers": 1, "heads": [3]}),
        ({"heads": {np.int64(1): np.array([3])}}, {"layers": 1, "heads": [3]}),
        ({"queries": 20}, {"queries": [20]}),
        ({"queries": np.array([20, 22])}, {"queries": [20, 22]}),
        ({"queries": torch.tensor([22, 20, 20])}, {"queries": [20, 22]}),
        ({"queries": range(20, 22)}, {"queries": [20, 21]}),
        ({"beta": 3}, {"beta": 3.0}),
        ({"beta": np.float32(0.5)}, {"beta": 0.5}),
    ],
)
def test_every_way_to_say_the_same(given, meant, tiny):
    one, two = call(tiny("llama"), [KVMask(**{"keys": (14, 17)} | kwargs) for kwargs in (given, meant)])
    assert torch.equal(one.logits, two.logits)
    assert one.receipt.cells_reached == two.receipt.cells_reached > 0


WRONG = [
    ({"keys": "needel"}, r"no span 'needel'; it has \['needle', 'other'\]"),
    ({"keys": None}, r"\(start, stop\) pairs or span names, not None"),
    ({"keys": 5}, "not 5"),
    ({"keys": [(1, 2, 3)]}, r"not \(1, 2, 3\)"),
    ({"keys": [(1.0, 3)]}, r"not \(1.0, 3\)"),
    ({"keys": [(True, 3)]}, r"not \(True, 3\)"),
    ({"keys": [5]}, "not 5"),
    ({"keys": (4, 4)}, r"\(4, 4\) does not fit the prompt: allowed is 0 ≤ start < stop ≤ 26"),
    ({"keys": (7, 4)}, r"\(7, 4\)"),
    ({"keys": (-3, 4)}, r"\(-3, 4\)"),
    ({"keys": (20, 27)}, r"\(20, 27\)"),
    ({"layers": 3}, "layer 3 does not exist: the model has layers 0 … 2"),
    ({"layers": [-1]}, "layer -1"),
    ({"layers": "all"}, "layers='all'"),
    ({"layers": 1.0}, r"layers=1.0"),
    ({"heads": 6}, "head 6 does not exist: the model has heads 0 … 5"),
    ({"heads": [-1]}, "head -1"),
    ({"heads": [0.5]}, r"heads=\[0.5\]"),
    ({"heads": {3: [0]}}, "layer 3"),
    ({"heads": {0: [6]}}, "head 6"),
    ({"heads": {0: "all"}}, "heads='all'"),
    ({"heads": {"first": [0]}}, r"heads' layers=\['first'\]"),
    ({"layers": [0], "heads": {1: [0]}}, r"heads names layers \[1\], none of layers=\[0\]"),
    ({"layers": [0], "heads": {0: [0], 9: [0]}}, "layer 9"),
    ({"queries": "sufix"}, "'sufix' is not one of suffix, after, generated or a list of positions"),
    ({"queries": []}, r"query positions \[\] are not allowed: give 0 … 25 or later"),
    ({"queries": [-1, 20]}, r"query positions \[-1\]"),
    ({"queries": [20.0]}, r"queries=\[20.0\]"),
    ({"queries": slice(18, 20)}, r"queries=slice\(18, 20, None\)"),
    ({"beta": 0}, "beta=0 must be positive"),
    ({"beta": -1.0}, "beta=-1.0"),
    ({"beta": math.nan}, "beta=nan"),
    ({"beta": "2"}, "beta='2'"),
    ({"on_empty": "ignore"}, "'ignore' is not one of raise, zero, keep_self"),
    (
        {"keys": (0, 21), "queries": [20]},
        r"removes every key that query 20 sees \(layer 0, head 0\).*'zero'.*'keep_self'",
    ),
    ({"keys": (0, 26), "heads": {1: [4]}}, r"query 18 sees \(layer 1, head 4\)"),
    ({"keys": (0, 26), "beta": 2.0}, "gives the same finite bias to every key that query 18 sees"),
    ({"keys": (0, 26), "beta": 2.0, "on_empty": "zero"}, "gives the same finite bias"),
]


@pytest.mark.parametrize(("given", "says"), WRONG)
def test_a_mistake_is_one_line(given, says, tiny):
    with pytest.raises(InterventionError, match=says) as caught:
        call(tiny("llama"), KVMask(**{"keys": (14, 17)} | given))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 260


def test_a_mistake_is_found_before_anything_runs(tiny, monkeypatch):
    from kvprobe import engine

    monkeypatch.setattr(engine, "forward", lambda *a: pytest.fail("the model ran"))
    with pytest.raises(InterventionError, match="head 9"):
        call(tiny("llama"), [KVMask((3, 6)), KVMask((3, 6), heads=9)])
    with pytest.raises(PromptError, match="do not fit"):
        call(tiny("llama"), KVMask((3, 6)), generate=500)


def test_a_window_hides_keys_and_full_rows_in_it_raise(tiny):
    """Mistral's row 18 sees 14 … 18 only: removing those is a full row, though 14 keys lie before them."""
    with pytest.raises(InterventionError, match="query 18 sees"):
        call(tiny("mistral"), KVMask((14, 19), queries=(18,)))
    call(tiny("llama"), KVMask((14, 19), queries=(18,)))


def test_a_learned_sink_needs_no_policy(tiny):
    out = call(tiny("gpt_oss"), KVMask((0, N), queries=[20]))
    assert bool((out.attention(0)[:, 20 - 18] == 0).all())
    assert out.receipt.silenced == () and float(out.receipt.retained[:, :, 2].min()) > 0
    assert call(tiny("gpt_oss"), KVMask((0, N), queries=[20], beta=1.0)).receipt.cells_reached > 0

"""Effects where prompts, precision, chunks and architectures are other than usual: always the same numbers."""

import catalogue
import pytest
import tiny as families
import torch
from catalogue import CONTINUED, LAYERS, SUFFIX, N
from edit_oracle import CellEdit, Edited
from torch.testing import assert_close

from kvprobe import Inject, KVMask, KVPatch, Prompt, ResidualAblation, ValueGate, attention, intervene, models, prefill
from kvprobe.errors import InterventionError
from kvprobe.interventions import fwd_hooks

every_family = pytest.mark.parametrize("family", families.FAMILIES)
D = 48
IDS = catalogue.ids()
PROMPT, GIVER = Prompt.from_ids(IDS, {"needle": (14, 17)}), Prompt.from_ids(catalogue.ids(seed=7))
NOISE = torch.randn(40, D, generator=torch.Generator().manual_seed(1))


def arms(model, rows, shift=0):
    """Every kind of arm; ``shift`` left pads move whatever is counted in the prompt's tokens."""
    donor = prefill(model, GIVER)
    move = lambda *at: tuple(each + shift for each in at)  # noqa: E731
    return [
        (),
        (ValueGate("needle"),),
        (ValueGate([move(2, 5), move(20, 22)], 0.3, layers=[0, 1], heads=[1, 4], queries="after"),),
        (KVPatch(move(12, 17), donor, (3, 8)),),
        (KVPatch([move(6, 9), move(19, 22)], donor, [(15, 18), (1, 4)], "k", queries="after"),),
        (KVPatch(move(19, 24), donor, (19, 24), "v", queries=move(21, 22, 25)),),
        (ResidualAblation(layers=[1]),),
        (ResidualAblation("attention", [0, 2], queries=move(9, 24)),),
        (ResidualAblation("mlp", 1),),
        (Inject({0: NOISE[0], 2: NOISE[:rows]}),),
        (Inject({1: NOISE[:3]}, queries=move(0, 20, 25)),),
        (KVMask(move(2, 4), queries="after"), ValueGate(move(3, 8), 2.0), Inject({1: NOISE[1]})),
        (KVMask([]),),
    ]


def both(model, first, second, prompts=(PROMPT, PROMPT), **options):
    options = {"suffix": SUFFIX, "continuation": CONTINUED} | options
    return (intervene(model, prompt, some, **options) for prompt, some in zip(prompts, (first, second), strict=True))


@every_family
def test_left_pads_move_positions_and_nothing_else(family, tiny):
    model, rows = tiny(family), SUFFIX + len(CONTINUED)
    padded = Prompt.from_ids([0, 0, 0, *IDS], {"needle": (17, 20)}, attention_mask=[0] * 3 + [1] * N)
    plain, moved = both(model, arms(model, rows), arms(model, rows, 3), (PROMPT, padded))
    for one, other in zip(plain, moved, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert [at + 3 for at in one.positions] == other.positions
        assert one.receipt.sites == other.receipt.sites


@every_family
def test_arms_that_start_anywhere_are_what_they_are_alone(family, tiny):
    model = tiny(family)
    some = arms(model, SUFFIX + len(CONTINUED))
    together, _ = both(model, some, some[:1])
    for arm, out in zip(some, together, strict=True):
        alone = intervene(model, PROMPT, [arm], suffix=SUFFIX, continuation=CONTINUED)[0]
        assert_close(out.logits, alone.logits, atol=1e-5, rtol=1e-5)
        assert out.receipt.sites == alone.receipt.sites


@every_family
@pytest.mark.parametrize("limit", [1, 40_000])
def test_chunks_change_nothing(family, tiny, monkeypatch, limit):
    """Arms and rows come apart; counts and numbers stay."""
    model, ids = tiny(family), catalogue.ids(3, 60)
    prompt, suffix = Prompt.from_ids(ids, {"needle": (14, 17)}), 37
    some = arms(model, suffix)
    whole = intervene(model, prompt, some, suffix=suffix)
    monkeypatch.setattr(attention, "CHUNK_BYTES", {"cpu": limit, "default": limit})
    seen, chunks = [], attention.chunks
    monkeypatch.setattr(attention, "chunks", lambda *a: seen.extend(made := [*chunks(*a)]) or made)
    pieces = intervene(model, prompt, some, suffix=suffix)
    assert {rows.start for _, rows in seen} > {0} and {b.start for b, _ in seen} > {0}
    for one, other in zip(whole, pieces, strict=True):
        assert_close(one.logits, other.logits, atol=1e-5, rtol=1e-5)
        assert one.receipt.sites == other.receipt.sites
        assert one.receipt.cells_reached == other.receipt.cells_reached
    assert torch.equal(pieces[0].logits[-16:], pieces[-1].logits[-16:])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_costs_what_it_costs_a_clean_run(family, dtype, tiny_folder):
    """Results keep the model's dtype; against the same weights in fp32 no effect errs much more than no effect."""
    half, full = models.load(tiny_folder(family), dtype=dtype), models.load(tiny_folder(family))
    with torch.no_grad():
        for name, weight in full.twin.named_parameters():
            weight.copy_(dict(half.twin.named_parameters())[name].float())
    rows = SUFFIX
    outs = intervene(half, PROMPT, arms(half, rows), suffix=SUFFIX, streams=2)
    exact = intervene(full, PROMPT, arms(full, rows), suffix=SUFFIX, streams=2)
    errors = []
    for out, truth in zip(outs, exact, strict=True):
        assert out.logits.dtype == out.streams.attn_out.dtype == out.streams.resid_post.dtype == dtype
        errors.append(float((out.logits.float() - truth.logits).norm() / truth.logits.norm()))
    changed = [float((out.logits - exact[0].logits).norm() / exact[0].logits.norm()) for out in exact[1:-1]]
    assert torch.equal(outs[0].logits, outs[-1].logits)
    assert max(errors) < 6 * errors[0] and min(changed) > 0
    assert sorted(changed)[len(changed) // 2] > errors[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_vectors_and_donors_of_another_precision(dtype, tiny, tiny_folder):
    model = tiny("llama")
    vector = torch.linspace(-2, 2, D).to(dtype).requires_grad_()
    same, other = (Inject({1: each}) for each in (vector.detach().float(), vector))
    donor = prefill(model, GIVER)
    rounded = [(keys.to(dtype), values.to(dtype)) for keys, values in donor.layers]
    back = [(keys.float(), values.float()) for keys, values in rounded]
    patches = [KVPatch("needle", type(donor)(donor.ids, layers), (3, 6)) for layers in (back, rounded)]
    first, second = both(model, [same, patches[0]], [other, patches[1]])
    for one, two in zip(first, second, strict=True):
        assert two.logits.dtype == torch.float32 and not two.logits.requires_grad
        assert_close(one.logits, two.logits, atol=1e-5, rtol=1e-5)


@every_family
def test_injected_rows_reach_into_what_is_generated(family, tiny, tiny_folder):
    """[R, D] vectors cover the suffix and every token that is run; greedy tokens are those of runs without a cache."""
    model, oracle, steps = tiny(family), Edited(tiny_folder(family)), 4
    vectors = NOISE[: SUFFIX + steps - 1] * 3
    arm = (Inject({1: vectors}), ResidualAblation("attention", 0))
    out = intervene(model, PROMPT, [(), arm], suffix=SUFFIX, generate=steps)[1]
    ids, found = list(IDS), []
    for _ in range(steps):
        rows = range(N - SUFFIX, len(ids))
        streams = [(1, "attention", rows, vectors[: len(rows)]), (0, "attention", rows, None)]
        token = int(oracle(ids, (), streams)[-1].argmax())
        if token == 2:
            break
        found.append(token)
        ids.append(token)
    assert out.generated == found
    assert all(count.expected == count.reached > 0 for count in out.receipt.sites.values())


def test_attention_of_patched_layers_is_refused(tiny):
    model = tiny("llama")
    out = intervene(model, PROMPT, KVPatch("needle", prefill(model, GIVER), layers=1), suffix=SUFFIX)
    assert out.patched == (1,) and out.attention(0).shape == (6, SUFFIX, N)
    for look in (out.attention, out.own_attention, out.corrected_attention):
        with pytest.raises(InterventionError, match="layer 1 ran with patched keys or values"):
            look(1)


def parallel(name):
    import transformers as t

    common = {**families.SIZES, "num_attention_heads": 6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if name == "gpt_neox":
        return t.GPTNeoXConfig(**common, use_parallel_residual=True)
    if name == "gpt_neox_sequential":
        return t.GPTNeoXConfig(**common, use_parallel_residual=False)
    return t.CohereConfig(**common, num_key_value_heads=2)


@pytest.mark.parametrize("name", ["gpt_neox", "gpt_neox_sequential", "cohere"])
def test_blocks_whose_parts_stand_side_by_side(name, tmp_path):
    """Fast path and TransformerLens' hooks agree; without attention and MLP there is no block."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(parallel(name), dtype=torch.float32)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    hf.save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    model = models.load(tmp_path)
    some, refused = arms(model, SUFFIX), 0
    outs = intervene(model, PROMPT, some, suffix=SUFFIX)
    for arm, out in zip(some, outs, strict=True):
        hooks = fwd_hooks(model, PROMPT, arm, SUFFIX)
        try:
            with torch.no_grad():
                hooked = model.bridge.run_with_hooks(PROMPT.ids[None], fwd_hooks=hooks, prepend_bos=False)
        except InterventionError as error:  # the bridge of joint projections hides its rotated queries
            assert "a patch of keys cannot be a hook" in str(error) and isinstance(arm[0], KVPatch)
            refused += 1
            continue
        assert_close(out.logits, hooked[0, -SUFFIX:], atol=2e-4, rtol=1e-4)
    assert refused == (2 if name.startswith("gpt_neox") else 0)
    oracle = Edited(tmp_path)
    moved = oracle.cache(catalogue.ids(seed=7), 9)
    keys, values = ({layer: moved[layer][part][:, 3:8] for layer in LAYERS} for part in (0, 1))
    edit = CellEdit([*range(12, 17)], [*range(N - SUFFIX, N)], [*range(6)], [*LAYERS], keys=keys, values=values)
    assert_close(outs[3].logits, oracle(IDS, [edit])[-SUFFIX:], atol=1e-4, rtol=1e-5)
    parts = (ResidualAblation("attention", [0, 2]), ResidualAblation("mlp", [0, 2]))
    clean, split, block = intervene(model, PROMPT, [(), parts, ResidualAblation(layers=[0, 2])], suffix=SUFFIX)
    assert_close(split.logits, block.logits, atol=1e-5, rtol=1e-5)
    assert (block.logits - clean.logits).abs().max() > 1e-3

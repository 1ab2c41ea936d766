"""Rotations that depend on how long a text is (longrope): pieces are the whole, or are refused; never neither."""

import pytest
import tiny as families
import torch
from oracles import Cutout, Plain, bias_table
from torch.testing import assert_close

from kvprobe import KVMask, Prompt, engine, intervene, models, observe, prefill
from kvprobe.errors import CapabilityError
from kvprobe.sizes import Limits

BORDER, N = 24, 40
IDS = torch.randint(3, 320, (N,), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", params=["phi3", "llama"])
def long(request, tmp_path_factory):
    """(kvprobe's model, plain transformers') whose keys turn otherwise in texts of more than 24 tokens."""
    half = 2 if request.param == "phi3" else 4
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": BORDER}
    rope |= {"short_factor": [1.0] * half, "long_factor": [4.0 + step for step in range(half)], "factor": 4.0}
    rope |= {"partial_rotary_factor": 0.5} if request.param == "phi3" else {}
    folder = tmp_path_factory.mktemp("long") / request.param
    more = {"original_max_position_embeddings": BORDER} if request.param == "phi3" else {}
    families.save(request.param, folder, rope_parameters=rope, max_position_embeddings=96, **more)
    return models.load(folder), Plain(folder)


@pytest.mark.parametrize("n", [BORDER - 4, BORDER, BORDER + 1, N])
@pytest.mark.parametrize("suffix", [1, 7, 18])
def test_arms_equal_plain_transformers_on_both_sides(n, suffix, long):
    model, plain = long
    cutout = Cutout(((3, 6),), (0, 1, 2), dict.fromkeys(range(3), tuple(range(6))), "suffix")
    table = bias_table([cutout], n, n=n, suffix=suffix, n_layers=3, n_heads=6)
    clean, masked = intervene(model, Prompt.from_ids(IDS[:n]), [(), KVMask((3, 6))], suffix=suffix)
    assert_close(clean.logits, plain(IDS[:n]).logits[-suffix:], atol=1e-4, rtol=1e-5)
    assert_close(masked.logits, plain(IDS[:n], table).logits[-suffix:], atol=1e-4, rtol=1e-5)


def test_forced_answers_count_as_length(long):
    model, plain = long
    out = intervene(model, Prompt.from_ids(IDS[:20]), [()], suffix=5, continuation=IDS[20:30].tolist())[0]
    assert_close(out.logits, plain(IDS[:30]).logits[15:], atol=1e-4, rtol=1e-5)


def test_a_prefix_serves_the_side_that_it_was_made_on(long):
    model, plain = long
    whole = observe(model, Prompt.from_ids(IDS), [-1])
    cut = intervene(model, Prompt.from_ids(IDS), [()], suffix=N - 20, prefix=whole.prefix(20))[0]
    assert_close(cut.logits, plain(IDS).logits[20:], atol=1e-4, rtol=1e-5)
    short, long_prompt = Prompt.from_ids(IDS[:BORDER]), Prompt.from_ids(IDS)
    for prompt, prefix in ((short, whole.prefix(20)), (long_prompt, prefill(model, short))):
        with pytest.raises(CapabilityError, match="rotates otherwise in a text of more than 24 tokens: keys of"):
            intervene(model, prompt, [()], suffix=4, prefix=prefix)
    with pytest.raises(CapabilityError, match=r"keys of a pass of 24 do not serve one of 40"):
        observe(model, long_prompt, [-1], prefix=prefill(model, short))


def test_pieces_on_two_sides_are_refused(long):
    model, _ = long
    whole = observe(model, Prompt.from_ids(IDS), [30, -1])
    with pytest.raises(CapabilityError, match="keys of a pass of 16 do not serve one of 32; allowed: passes that"):
        observe(model, Prompt.from_ids(IDS), plan=Limits(chunk=16))
    pieces = observe(model, Prompt.from_ids(IDS), [30, -1], plan=Limits(chunk=26))
    assert_close(pieces.layer(2).attention, whole.layer(2).attention, atol=1e-5, rtol=1e-5)


def test_an_answer_does_not_grow_across_the_border(long):
    model, _ = long
    assert len(intervene(model, Prompt.from_ids(IDS[:20]), [()], suffix=4, generate=4)[0].generated) <= 4
    with pytest.raises(CapabilityError, match="fewer generated tokens"):
        intervene(model, Prompt.from_ids(IDS[:22]), [()], suffix=4, generate=8)


def test_which_models_have_a_border(long, tiny):
    assert engine.rotation_border(long[0].twin) == (BORDER, True)
    assert all(engine.rotation_border(tiny(family).twin) is None for family in families.FAMILIES)

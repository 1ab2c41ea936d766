"""``device_map``: accelerate's hooks on the CPU change nothing, and weights that lie elsewhere are refused."""

import pytest
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from torch.testing import assert_close

from kvprobe import engine, intervene, models, observe
from kvprobe.attention import Run
from kvprobe.errors import ModelError
from kvprobe.interventions import KVMask
from kvprobe.prompts import Prompt

PARTS = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.norm", "model.rotary_emb", "lm_head"]
PROMPT = Prompt.from_ids(list(range(5, 25)))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, dict.fromkeys(PARTS, "cpu")])
def test_a_map_to_the_cpu_changes_nothing(device_map, tiny, tiny_folder):
    mine, theirs = models.load(tiny_folder("llama"), device_map=device_map), tiny("llama")
    one, two = (intervene(model, PROMPT, KVMask((3, 5)), suffix=4, generate=3) for model in (mine, theirs))
    assert torch.equal(one.logits, two.logits) and one.generated == two.generated
    assert mine.report.shared_parameters == theirs.report.shared_parameters


@pytest.mark.parametrize("away", [["model.layers.1"], ["model.layers.2", "lm_head"], PARTS])
def test_weights_on_disk_are_refused(away, tiny_folder, tmp_path):
    where = {part: "disk" if part in away else "cpu" for part in PARTS}
    with pytest.raises(ModelError, match="partly offloaded to disk: the twin cannot share its weights; load") as caught:
        models.load(tiny_folder("llama"), device_map=where, offload_folder=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_device_that_is_not_there(tiny_folder):
    for options in ({"device_map": "cuda"}, {"device": "cuda"}):
        with pytest.raises(ModelError, match=r"cannot load|not available") as caught:
            models.load(tiny_folder("llama"), **options)
        assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def hooked(tiny_folder):
    """A model as accelerate dispatches it over several devices, here all of them the CPU, and its twin."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), attn_implementation="eager").eval()
    attach_align_device_hook_on_blocks(hf, execution_device=dict.fromkeys(["", *PARTS], "cpu"), offload={"": False})
    assert all(hasattr(layer, "_hf_hook") for layer in hf.model.layers)
    return hf, models.make_twin(hf)


def test_a_twin_of_a_hooked_model_has_hooks_of_its_own_and_the_same_weights(hooked, tiny):
    hf, twin = hooked
    for theirs, mine in zip(hf.modules(), twin.modules(), strict=True):
        assert mine is not theirs
        if hasattr(theirs, "_hf_hook"):  # accelerate replaces forward: it must call the twin's own module
            assert mine.forward.args[0] is mine and mine._old_forward.__self__ is mine
            assert mine._hf_hook is not theirs._hf_hook
    assert all(a is b for a, b in zip(hf.parameters(), twin.parameters(), strict=True))
    run = Run(outputs={})
    logits = engine.forward(twin, PROMPT.ids[None], run, engine.new_cache())
    assert sorted(run.outputs) == [0, 1, 2]
    with torch.no_grad():
        assert_close(logits, hf(PROMPT.ids[None], use_cache=False).logits, atol=5e-5, rtol=1e-5)


def test_a_hooked_twin_is_observed_and_intervened_on(hooked, tiny):
    from dataclasses import replace

    model = replace(tiny("llama"), twin=hooked[1])
    mask = KVMask((3, 5), heads=[1], queries="after")
    assert_close(intervene(model, PROMPT, mask).logits, intervene(tiny("llama"), PROMPT, mask).logits, atol=0, rtol=0)
    rows = [observe(one, PROMPT).layer(2).attention for one in (model, tiny("llama"))]
    assert_close(*rows, atol=0, rtol=0)

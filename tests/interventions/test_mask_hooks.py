"""KVMask in TransformerLens' own run_with_hooks: the slow way to the same logits."""

import catalogue
import pytest
import tiny as families
import torch
from catalogue import ARMS, SUFFIX, N
from torch.testing import assert_close

from kvprobe import KVMask, Prompt, intervene
from kvprobe.errors import InterventionError

every_family = pytest.mark.parametrize("family", families.FAMILIES)
PROMPT = Prompt.from_ids(catalogue.ids())
HOOKED = [name for name in ARMS if len(ARMS[name]) == 1]


@every_family
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_in_transformer_lens_equal_the_fast_path(family, name, tiny):
    model, mask = tiny(family), catalogue.arm(name)[0]
    out = intervene(model, PROMPT, mask, suffix=SUFFIX)
    with torch.no_grad():
        hooked = model.bridge.run_with_hooks(
            PROMPT.ids[None], fwd_hooks=mask.fwd_hooks(model, PROMPT, SUFFIX), prepend_bos=False
        )
    assert_close(out.logits, hooked[0, N - SUFFIX :], atol=1e-4, rtol=1e-5)


@every_family
def test_hooks_of_two_masks_compose(family, tiny):
    model, arm = tiny(family), catalogue.arm("two masks that overlap")
    hooks = [hook for mask in arm for hook in mask.fwd_hooks(model, PROMPT, SUFFIX)]
    with torch.no_grad():
        hooked = model.bridge.run_with_hooks(PROMPT.ids[None], fwd_hooks=hooks, prepend_bos=False)
    out = intervene(model, PROMPT, [arm], suffix=SUFFIX)[0]
    assert_close(out.logits, hooked[0, N - SUFFIX :], atol=1e-4, rtol=1e-5)


def test_hooks_of_a_padded_prompt_are_for_its_real_tokens(tiny):
    model = tiny("llama")
    padded = Prompt.from_ids([0, 0, *PROMPT.ids.tolist()], {"needle": (6, 9)}, attention_mask=[0, 0] + [1] * N)
    for mask in (KVMask("needle"), KVMask((2, 24), queries=(23,), on_empty="zero")):
        with torch.no_grad():
            hooked = model.bridge.run_with_hooks(
                padded.ids[None, 2:], fwd_hooks=mask.fwd_hooks(model, padded, SUFFIX), prepend_bos=False
            )
        assert_close(intervene(model, padded, mask, suffix=SUFFIX).logits, hooked[0, -SUFFIX:], atol=1e-4, rtol=1e-5)


def test_hooks_refuse_another_run_than_theirs(tiny):
    model = tiny("llama")
    hooks = KVMask((3, 6)).fwd_hooks(model, PROMPT, SUFFIX)
    with pytest.raises(InterventionError, match=r"scores of shape \(1, 6, 25, 25\).* over 26 tokens"), torch.no_grad():
        model.bridge.run_with_hooks(PROMPT.ids[None, 1:], fwd_hooks=hooks, prepend_bos=False)


def test_hooks_do_not_forget_the_suffix(tiny):
    with pytest.raises(InterventionError, match="needs suffix="):
        KVMask((3, 6)).fwd_hooks(tiny("llama"), PROMPT)
    assert KVMask((3, 6), queries="after").fwd_hooks(tiny("llama"), PROMPT)

"""A mask on every layer is a cache from which the entries are really gone, for all later queries."""

import catalogue
import pytest
import torch
from catalogue import CONTINUED, SUFFIX, N
from torch.testing import assert_close

from kvprobe import KVMask, Prompt, intervene

IDS = catalogue.ids()


def without(hf, ids, spans, start):
    """Plain transformers: read ids[:start], delete the spans' entries from its cache, go on at the old positions."""
    from transformers import DynamicCache

    cache, rest = DynamicCache(), torch.tensor(ids)[None]
    keep = torch.tensor([at for at in range(start) if not any(a <= at < b for a, b in spans)])
    with torch.no_grad():
        hf(rest[:, :start], past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
        positions = torch.arange(start, len(ids))[None]
        return hf(rest[:, start:], past_key_values=cache, position_ids=positions, use_cache=True).logits[0]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("spans", [[(4, 7)], [(0, 1)], [(2, 5), (9, 17)], [(1, 18)]])
def test_a_mask_on_every_layer_equals_a_cache_without_the_entries(family, spans, tiny, plain):
    out = intervene(tiny(family), Prompt.from_ids(IDS), KVMask(spans), suffix=SUFFIX, continuation=CONTINUED)
    reference = without(plain(family).hf, [*IDS, *CONTINUED], spans, N - SUFFIX)
    assert_close(out.logits, reference, atol=1e-4, rtol=1e-5)
    clean = plain(family)([*IDS, *CONTINUED]).logits[N - SUFFIX :]
    assert (reference - clean).abs().max() > 1e-3


@pytest.mark.slow
def test_so_it_does_on_the_embedded_model(smol, smol_path):
    """A needle of 600 tokens of text, its evidence and two windows: within 5e-4."""
    from transformers import AutoModelForCausalLM

    from kvprobe import tasks

    hf = AutoModelForCausalLM.from_pretrained(smol_path, attn_implementation="eager", dtype=torch.float32).eval()
    item = tasks.make("niah_single_2", smol, length=600, seed=0, distractors=0)
    spans = [*item.spans["evidence"], (300, 320), (0, 2)]
    suffix = len(item.prompt) - item.context_stop
    out = intervene(smol, item.prompt, KVMask(spans), suffix=suffix, continuation=item.answer_ids)
    ids = [*item.prompt.ids.tolist(), *item.answer_ids]
    assert_close(out.logits, without(hf, ids, spans, item.context_stop), atol=5e-4, rtol=0)

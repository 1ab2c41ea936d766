"""One pass of the twin: logits, shared prefixes, and the output projection as the theory reads it."""

from types import SimpleNamespace

import pytest
import tiny as families
import torch
from torch import nn
from torch.testing import assert_close

from kvprobe import attention, engine
from kvprobe.attention import Run
from kvprobe.errors import ModelError

every_family = pytest.mark.parametrize("family", families.FAMILIES)
IDS = torch.randint(3, 320, (20,), generator=torch.Generator().manual_seed(0))


def close(mine, reference):
    assert_close(mine, reference, atol=5e-5, rtol=1e-5)


@every_family
@pytest.mark.parametrize("n", [1, 2, 5, 6, 20])
def test_prefill_is_transformers(family, n, tiny, plain):
    """One token; a prompt as long as the window (5, or 6); longer ones."""
    prefix, _ = engine.prefill(tiny(family).twin, IDS[:n])
    close(prefix.next_logits, plain(family)(IDS[:n]).logits[-1])
    with torch.no_grad():
        theirs = plain(family).hf(input_ids=IDS[None, :n], use_cache=True).past_key_values
    for (keys, values), layer in zip(prefix.layers, theirs.layers, strict=True):
        kept = layer.keys.shape[2]  # transformers drops what a window layer will not see again
        close(keys[:, n - kept :], layer.keys[0])
        close(values[:, n - kept :], layer.values[0])
        assert keys.shape[1] == n == len(prefix)


@every_family
@pytest.mark.parametrize("cut", [1, 4, 5, 11, 19])
def test_a_run_in_two_pieces_is_a_run_in_one(family, cut, tiny, plain):
    prefix, _ = engine.prefill(tiny(family).twin, IDS[:cut])
    rest = engine.forward(tiny(family).twin, IDS[None, cut:], Run(prefix=prefix.layers, start=cut), engine.new_cache())
    close(rest[0], plain(family)(IDS).logits[cut:])


@every_family
def test_steps_grow_the_cache_beside_a_prefix_that_is_never_copied(family, tiny, plain):
    twin, cache = tiny(family).twin, engine.new_cache()
    prefix, _ = engine.prefill(twin, IDS[:8])
    before = [keys.clone() for keys, _ in prefix.layers]
    rows = [
        engine.forward(twin, IDS[None, at : at + 3].expand(2, -1), Run(prefix=prefix.layers, start=at), cache)
        for at in (8, 11, 14, 17)
    ]
    reference = plain(family)(IDS).logits[8:]
    for arm in range(2):
        close(torch.cat([row[arm] for row in rows]), reference)
    assert all(keys.shape == (2, keys.shape[1], 12, 8) for keys, _ in engine.cached_layers(cache))
    assert all(torch.equal(old, new) for old, (new, _) in zip(before, prefix.layers, strict=True))


@every_family
def test_keep_chooses_rows(family, tiny):
    twin = tiny(family).twin
    whole = engine.forward(twin, IDS[None], Run(), engine.new_cache())
    assert_close(engine.forward(twin, IDS[None], Run(), engine.new_cache(), keep=3), whole[:, -3:])
    some = engine.forward(twin, IDS[None], Run(), engine.new_cache(), keep=torch.tensor([0, 7]))
    assert_close(some, whole[:, [0, 7]])


@every_family
def test_an_extended_prefix_is_a_longer_prefill(family, tiny):
    twin = tiny(family).twin
    long, _ = engine.prefill(twin, IDS)
    short, _ = engine.prefill(twin, IDS[:7])
    grown = engine.extend(twin, short, IDS[7:])
    assert torch.equal(grown.ids, IDS) and len(short) == 7
    close(grown.next_logits, long.next_logits)
    for mine, reference in zip(grown.layers, long.layers, strict=True):
        close(mine[0], reference[0])
        close(mine[1], reference[1])


def test_the_beginning_of_a_prefix_is_a_view(tiny):
    prefix, _ = engine.prefill(tiny("llama").twin, IDS)
    short = prefix.upto(6)
    assert len(short) == 6 and short.next_logits is None and prefix.upto(20) is prefix
    for (keys, values), (whole_keys, whole_values) in zip(short.layers, prefix.layers, strict=True):
        assert keys.untyped_storage().data_ptr() == whole_keys.untyped_storage().data_ptr()
        assert values.untyped_storage().data_ptr() == whole_values.untyped_storage().data_ptr()
        assert keys.shape == (2, 6, 8)
    assert prefix.n_bytes == 3 * 2 * 2 * 20 * 8 * 4


@pytest.mark.parametrize("length", [0, -1, 21])
def test_a_prefix_has_no_beginning_longer_than_itself(length, tiny):
    prefix, _ = engine.prefill(tiny("llama").twin, IDS)
    with pytest.raises(ModelError, match=f"a prefix of 20 tokens has no first {length} tokens"):
        prefix.upto(length)


@every_family
def test_captured_rows_are_the_queries_of_those_positions(family, tiny):
    _, run = engine.prefill(tiny(family).twin, IDS, torch.tensor([2, 17]))
    _, whole = engine.prefill(tiny(family).twin, IDS, torch.arange(20))
    for layer in range(3):
        assert torch.equal(run.queries[layer], whole.queries[layer][:, :, [2, 17]])


@every_family
def test_no_gradient_and_no_hook_is_left(family, tiny):
    twin = tiny(family).twin
    out = engine.forward(twin, IDS[None], Run(), engine.new_cache())
    assert not out.requires_grad and attention._ACTIVE.get() is None
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in twin.modules())


@every_family
def test_output_weights_are_views_of_the_projection_by_head(family, tiny):
    model = tiny(family)
    for layer, module in enumerate(engine.attention_modules(model.twin, 3)):
        assert module.layer_idx == layer
        w_o = engine.output_weights(module, 6)
        projection = module.c_proj if family == "gpt2" else module.o_proj
        assert w_o.shape == (6, 8, 48) and not w_o.requires_grad
        assert w_o.untyped_storage().data_ptr() == projection.weight.untyped_storage().data_ptr()
        z = torch.randn(6, 8, generator=torch.Generator().manual_seed(layer))
        bias = engine.output_bias(module)
        with torch.no_grad():
            theirs = projection(z.flatten())
        mine = sum(z[h] @ w_o[h] for h in range(6))
        assert_close(mine if bias is None else mine + bias, theirs, atol=1e-5, rtol=1e-5)
        assert (bias is not None) == (family in ("gpt2", "gpt_oss"))
        assert torch.equal(model.w_o(layer), w_o)


def module_with(**children):
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def test_weights_that_are_not_floating_point_are_refused():
    quantised = nn.Linear(4, 4)
    quantised.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match=r"Module\.o_proj\.weight is stored as torch\.int8.*unquantised"):
        engine.output_weights(module_with(o_proj=quantised), 2)
    with pytest.raises(ModelError, match=r"o_proj\.weight is stored as None"):
        engine.output_weights(module_with(o_proj=nn.Module()), 2)


def test_an_unknown_projection_is_refused():
    with pytest.raises(ModelError, match=r"no output projection that kvprobe knows \(o_proj, c_proj"):
        engine.output_weights(module_with(project=nn.Linear(4, 4)), 2)
    assert engine.output_bias(module_with(project=nn.Linear(4, 4))) is None


def test_missing_attention_modules_are_refused(tiny):
    with pytest.raises(ModelError, match=r"layers \[0, 1, 2\], expected 0 … 4"):
        engine.attention_modules(tiny("llama").twin, 5)
    with pytest.raises(ModelError, match=r"SimpleNamespace: attention modules found for layers \[\]"):
        engine.attention_modules(SimpleNamespace(modules=lambda: iter([nn.Linear(2, 2)])), 1)

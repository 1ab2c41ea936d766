"""Every family under every law, in fp32 with its default heads (fast), and in every layout and dtype (slow)."""

import pytest
import tiny
from conformance import table
from conformance.laws import LAWS

ACCEPTED, REFUSED = tuple(tiny.CONFIGS), tuple(tiny.REFUSED)


@pytest.mark.parametrize("family", ACCEPTED)
def test_laws_hold_in_fp32(family):
    layout = next(iter(tiny.layouts(family)))
    said = table.outcomes(family, layout, "fp32")
    assert {column: len(of) for column, of in said.items()} == {
        column: sum(law.earns == column for law in LAWS) for column in table.COLUMNS
    }
    if not table.pinned():
        return
    why = table.reason(family)
    line = table.lines(table.DOCUMENT.read_text(), (family,), "- {}: ").get(family)
    assert why == line, "docs/models.md is not what was found: python tests/conformance/table.py writes it"


@pytest.mark.slow
@pytest.mark.parametrize("family", ACCEPTED)
def test_laws_hold_in_every_layout_and_dtype(family):
    """And the support table says of them what was found."""
    written = table.lines(table.DOCUMENT.read_text(), (family,))
    assert written == {family: table.row(family)}, "python tests/conformance/table.py writes docs/models.md"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shape"), tiny.SHAPES)
def test_laws_hold_for_heads_of_any_size(family, shape):
    """kvpress#213: a head size that is odd, or no quotient of the hidden size, or not in the config."""
    case = table.case(family, shape, "fp32")
    wanted = {"d = 7": 7, "d = 9": 9, "no head_dim": 8}.get(shape, tiny.SHAPES[family, shape].get("head_dim"))
    assert case.model.geometry.head_dim == wanted
    assert {why for said in table.outcomes(family, shape, "fp32").values() for why in said} == {None}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["olmo2", "olmo3", "llama"])
def test_rotated_queries_and_keys_have_the_models_dtype(family, dtype):
    """OLMo's cos and sin are fp32: unless rounded back, TransformerLens crashes upon a cache of the model's dtype."""
    import torch

    model = table.case(family, next(iter(tiny.layouts(family))), dtype).model
    seen, ids = {}, torch.tensor([[5, 6, 7, 8, 9, 10]])
    names = [f"blocks.1.attn.hook_{name}" for name in ("rot_q", "rot_k", "attn_scores", "pattern", "z")]
    hooks = [(name, lambda tensor, hook: seen.setdefault(hook.name, tensor.dtype) and None) for name in names]
    with torch.no_grad():
        cache = model.twin(input_ids=ids[:, :4], use_cache=True).past_key_values
        model.bridge.reset_hooks()
        rest = model.bridge.run_with_hooks(ids[:, 4:], fwd_hooks=hooks, past_key_values=cache, prepend_bos=False)
    assert rest.dtype == model.dtype and len(seen) == len(names) and set(seen.values()) == {model.dtype}
    assert all(layer.keys.dtype == layer.values.dtype == model.dtype for layer in cache.layers)


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_masked_is_refused_in_words(family):
    from conformance.cases import refused

    try:
        error = refused(family)
    except AssertionError:
        # Another transformers may compute a class by other means: then it must stand under every law.
        assert not table.pinned() and table.outcomes(family, next(iter(tiny.layouts(family))), "fp32")
        return
    assert table._architecture(family) in str(error) and "transformers 5." in str(error)
    assert "allowed" in str(error) or "way out" in str(error) or "; use " in str(error)
    written = table.lines(table.DOCUMENT.read_text(), (family,))
    assert not table.pinned() or written == {family: table.refused_row(family)}, (
        "python tests/conformance/table.py writes docs/models.md"
    )


def test_the_table_has_these_rows_and_no_others():
    text = table.DOCUMENT.read_text()
    rows, refusals = table.lines(text, ACCEPTED), table.lines(text, REFUSED)
    assert text == table.render(rows, table.lines(text, ACCEPTED, "- {}: "), refusals)
    assert tuple(rows) == ACCEPTED and tuple(refusals) == REFUSED
    assert sum(" yes | yes | yes | yes |" in row for row in rows.values()) >= 18

"""Laws of effects, each against loops in float64 or against another intervention that must do the same."""

import math

import catalogue
import pytest
import tiny as families
import torch
from catalogue import CONTINUED, HEADS, LAYERS, SUFFIX, N
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvprobe import Inject, KVMask, KVPatch, Prompt, ResidualAblation, ValueGate, engine, intervene, prefill, theory
from kvprobe.theory.perturbation import per_query_head

every_family = pytest.mark.parametrize("family", families.FAMILIES)
D, TOTAL = 48, N + len(CONTINUED)
PROMPT, GIVER = Prompt.from_ids(catalogue.ids(), {"needle": (14, 17)}), Prompt.from_ids(catalogue.ids(seed=7))
examples = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
spans = st.tuples(st.integers(0, N - SUFFIX - 1), st.integers(1, 6)).map(lambda s: (s[0], min(s[0] + s[1], N - SUFFIX)))
some_heads = st.none() | st.sets(st.sampled_from(HEADS), min_size=1).map(sorted)


def run(model, *arms, **options):
    """The clean outcome, then the arms'."""
    options = {"suffix": SUFFIX, "streams": SUFFIX} | options
    return intervene(model, PROMPT, [(), *arms], **options)


def gated_by_loops(view, span, heads, scale, offset):
    """(c − 1) Σ_h Σ_S A V W_O for every row, in float64."""
    A, V, W = view.attention.double(), view.values.double(), view.w_o.double()
    group = A.shape[0] // V.shape[0]
    out = torch.zeros(A.shape[1], W.shape[-1], dtype=torch.float64)
    for row in range(A.shape[1]):
        for head in HEADS if heads is None else heads:
            for key in range(*span):
                out[row] += (scale - 1) * A[head, row, key] * (V[head // group, key] @ W[head])
    return out


@every_family
@given(data=st.data())
@examples
def test_a_gate_changes_the_layer_by_what_its_keys_say(family, tiny, data):
    """Law 10 at the first gated layer: attn_out moves by (c − 1) Σ_S A V W_O, and A stays."""
    span, heads, layer = data.draw(spans), data.draw(some_heads), data.draw(st.sampled_from(LAYERS))
    scale = data.draw(st.floats(-3, 3, width=32))
    clean, out = run(tiny(family), ValueGate(span, scale, layer, heads))
    change = (out.streams.attn_out - clean.streams.attn_out)[layer].double()
    view = clean.trace.layer(layer)
    rows = slice(-SUFFIX, None)
    expected = gated_by_loops(view, span, heads, scale, N - SUFFIX)[rows]
    assert_close(change, expected, atol=2e-5, rtol=1e-4)
    S = torch.zeros(view.attention.shape, dtype=torch.bool)
    S[list(HEADS if heads is None else heads), :, slice(*span)] = True
    V, W = per_query_head(view.values.double(), len(HEADS))[:, None], view.w_o.double()[:, None]
    vector = theory.value_gate_vector(view.attention.double(), V, W, S, scale).sum(0)
    assert_close(vector[rows], expected, atol=1e-9, rtol=1e-7)
    assert_close(out.attention(layer), clean.attention(layer), atol=0, rtol=0)


@every_family
@given(data=st.data())
@examples
def test_a_dose_scales_the_heads_shift_by_kappa(family, tiny, data):
    """Law 8 on a layer's real output: one head, one layer, β in nats."""
    span, head, layer = data.draw(spans), data.draw(st.sampled_from(HEADS)), data.draw(st.sampled_from(LAYERS))
    beta = data.draw(st.floats(0.05, 12.0))
    chosen = {"layers": layer, "heads": head}
    clean, cut, dosed = run(tiny(family), KVMask(span, **chosen), KVMask(span, beta=beta, **chosen))
    whole, part = (out.streams.attn_out[layer] - clean.streams.attn_out[layer] for out in (cut, dosed))
    rows, sink = (each if each is None else each[head, -SUFFIX:].double() for each in clean.trace.layer(layer).rows())
    kept = rows[:, : span[0]].sum(-1) + rows[:, span[1] :].sum(-1) + (0 if sink is None else sink)
    kappa = theory.kappa(beta, rows[:, slice(*span)].sum(-1), kept)
    assert_close(part.double(), kappa[:, None] * whole.double(), atol=2e-5, rtol=1e-4)


@every_family
def test_a_dose_without_end_meets_the_mask(family, tiny):
    """β of 64 nats is −∞ to fp32's digits, β of 10,000 to the last bit."""
    mask = {"keys": [(4, 7), (13, 17)], "heads": [0, 3, 4]}
    betas = (1.0, 64.0, 1e4)
    _, cut, *dosed = run(tiny(family), KVMask(**mask), *(KVMask(**mask, beta=beta) for beta in betas))
    gaps = [float((out.logits - cut.logits).abs().max()) for out in dosed]
    assert gaps[0] > 1e-3 and gaps[1] < 1e-5 and gaps[2] == 0


@every_family
@pytest.mark.parametrize("layer", LAYERS)
def test_the_masks_own_shift_injected_is_the_mask(family, tiny, layer):
    """Δo = Σ_h (z′ − z) W_O of the masked layer, from the clean trace alone; then all that follows is the same."""
    mask = KVMask([(4, 7), (13, 17)], layers=layer, heads=[0, 2, 3])
    clean, cut = run(tiny(family), mask, continuation=CONTINUED)
    view = clean.trace.layer(layer)
    keep = torch.ones(view.attention.shape, dtype=torch.bool)
    for head in (0, 2, 3):
        for key in (4, 5, 6, 13, 14, 15, 16):
            keep[head, :, key] = False
    A, sink = (each if each is None else each.double() for each in view.rows())
    V, W = per_query_head(view.values.double(), len(HEADS))[:, None], view.w_o.double()[:, None]
    shift = theory.perturbation_vector(A, V, W, keep, sink).sum(0)[-SUFFIX - len(CONTINUED) :]
    injected = run(tiny(family), Inject({layer: shift}), continuation=CONTINUED)[1]
    assert_close(injected.logits, cut.logits, atol=1e-4, rtol=1e-4)
    assert (cut.logits - clean.logits).abs().max() > 1e-3


@every_family
def test_without_its_last_block_a_model_says_what_the_lens_reads_before_it(family, tiny):
    model = tiny(family)
    clean, out = run(model, ResidualAblation("block", 2, queries=(N - 1,)), suffix=1, streams=1)
    stem = model.twin.transformer.ln_f if family == "gpt2" else model.twin.model.norm
    with torch.no_grad():
        logits = model.twin.get_output_embeddings()(stem(clean.streams.resid_post[1][None])).float()[0]
    limit = getattr(model.twin.config, "final_logit_softcapping", None)
    logits = limit * torch.tanh(logits / limit) if limit else logits
    assert_close(out.logits, logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(out.streams.resid_post[2], clean.streams.resid_post[1])


@every_family
def test_a_block_without_attention_and_mlp_is_no_block(family, tiny):
    parts = (ResidualAblation("attention", [0, 2]), ResidualAblation("mlp", [0, 2]))
    clean, both, block = run(tiny(family), parts, ResidualAblation("block", [0, 2]), continuation=CONTINUED)
    assert_close(both.logits, block.logits, atol=1e-5, rtol=1e-5)
    assert (both.logits - clean.logits).abs().max() > 1e-2


def kinds(model):
    donor = prefill(model, GIVER)
    return [
        KVMask((9, 12)),
        KVMask((9, 12), beta=1.0, heads=2),
        ValueGate("needle"),
        KVPatch("needle", donor),
        KVPatch("needle", donor, (3, 6), "v", layers=1),
        ResidualAblation("block", 1),
        ResidualAblation("mlp", [0, 2]),
        Inject({1: torch.ones(D)}),
        (ValueGate("needle", 2.0), KVPatch((8, 13), donor), Inject({0: torch.ones(D)}), KVMask((2, 4), layers=0)),
        ValueGate((1, 3), queries="after"),
    ]


@every_family
def test_identity_is_clean_bit_for_bit_beside_every_kind_of_arm(family, tiny):
    model = tiny(family)
    options = {"continuation": CONTINUED, "generate": 3}
    nothing = (ValueGate([]), KVPatch([], prefill(model, GIVER)))
    for arm in kinds(model):
        clean, _, identity, empty = run(model, arm, KVMask([]), nothing, **options)
        for other in (identity, empty):
            assert torch.equal(other.logits, clean.logits) and other.generated == clean.generated
            assert torch.equal(other.streams.resid_post, clean.streams.resid_post)
            assert torch.equal(other.streams.attn_out, clean.streams.attn_out)


@every_family
def test_effects_that_change_nothing_are_clean(family, tiny):
    model = tiny(family)
    own = prefill(model, PROMPT)
    zeros = Inject({0: torch.zeros(D), 2: torch.zeros(SUFFIX + 3, D)})
    arms = [ValueGate((3, 16), 1.0), KVPatch((3, 16), own), KVPatch((19, 23), own, what="v", queries=(24, 25))]
    clean, none, *rest = run(model, zeros, *arms, continuation=CONTINUED)
    assert torch.equal(none.logits, clean.logits)
    for out in rest:
        assert_close(out.logits, clean.logits, atol=1e-5, rtol=1e-5)


@every_family
def test_two_gates_multiply_and_a_gate_of_zero_beats_any(family, tiny):
    two, one, zero, beaten = run(
        tiny(family),
        (ValueGate((3, 9), 0.5), ValueGate((5, 16), 0.4)),
        (ValueGate((3, 5), 0.5), ValueGate((5, 9), 0.2), ValueGate((9, 16), 0.4)),
        ValueGate((5, 9)),
        (ValueGate((5, 9), -2.0), ValueGate((5, 9))),
    )[1:]
    assert_close(two.logits, one.logits, atol=1e-5, rtol=1e-5)
    assert_close(zero.logits, beaten.logits, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_vectors_made_of_a_norm_and_a_direction(p, dtype):
    """‖v‖_p is the norm, whatever the direction's dtype and length; norms may be one a row and one a layer."""
    g = torch.Generator().manual_seed(0)
    along = torch.randn(4, D, generator=g, dtype=torch.float64).to(dtype)
    lengths = [0.0, 1e-3, 2.5, 1e4]
    made = Inject.of({0: lengths, 1: 3.0}, {0: along, 1: along[0], 2: along}, p=p).vectors
    assert sorted(made) == [0, 1]
    for row, length in enumerate(lengths):
        assert math.isclose(float(made[0][row].double().norm(p)), length, rel_tol=1e-6, abs_tol=1e-12)
        assert length == 0 or float(torch.cosine_similarity(made[0][row].double(), along[row].double(), 0)) > 1 - 1e-6
    assert math.isclose(float(made[1].double().norm(p)), 3.0, rel_tol=1e-6)


@every_family
def test_where_every_key_is_gated_only_the_bias_is_left(family, tiny):
    """Rows of their own included, and the tokens that are decoded too."""
    model = tiny(family)
    out = run(model, ValueGate((0, N), layers=1), streams=SUFFIX, generate=2)[1]
    bias = engine.output_bias(engine.attention_modules(model.twin, len(LAYERS))[1])
    left = torch.zeros(D) if bias is None else bias.detach()
    assert_close(out.streams.attn_out[1], left.expand(SUFFIX, D), atol=1e-6, rtol=1e-6)
    assert out.receipt.sites["weights"].reached > 0

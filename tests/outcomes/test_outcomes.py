"""Outcomes: attention corrected before it is compared, and splits that add up exactly."""

import math

import catalogue
import pytest
import tiny as families
import torch
from catalogue import ARMS, CONTINUED, LAYERS, SUFFIX
from torch.testing import assert_close

from kvprobe import Prompt, Trace, intervene, observe
from kvprobe.errors import InterventionError, TheoryError
from kvprobe.interventions.plan import ArmBias, Cut, Rows
from kvprobe.outcomes import Outcome
from kvprobe.receipts import Receipt
from kvprobe.traces import LayerData
from kvprobe.twopart import LayerSpec

every_family = pytest.mark.parametrize("family", families.FAMILIES)
PROMPT = Prompt.from_ids(catalogue.ids())
TOKENS = [*PROMPT.ids.tolist(), *CONTINUED]
HARD = [name for name in ARMS if not any(math.isfinite(cutout.beta) for _, cutout in ARMS[name])]


@pytest.fixture(scope="module")
def outcomes(tiny):
    done = {}

    def run(family):
        if family not in done:
            options = {"suffix": SUFFIX, "continuation": CONTINUED}
            done[family] = dict(zip(ARMS, intervene(tiny(family), PROMPT, catalogue.arms(), **options), strict=True))
        return done[family]

    return run


@pytest.fixture(scope="module")
def clean_rows(tiny):
    """Family → the clean run's rows at every position of prompt and continuation."""
    done = {}

    def run(family):
        if family not in done:
            done[family] = observe(tiny(family), PROMPT.extended(CONTINUED), slice(None))
        return done[family]

    return run


def keep_table(name, layer, queries):
    return catalogue.table(name)[layer][:, queries] > -torch.inf


@every_family
def test_in_a_clean_run_all_readings_coincide(family, outcomes, clean_rows, plain):
    clean, reference = outcomes(family)["clean"], plain(family)(TOKENS).attention
    for layer in LAYERS:
        rows = clean.attention(layer)
        assert_close(rows, reference[layer][:, clean.trace.queries], atol=1e-5, rtol=1e-4)
        assert torch.equal(rows, clean.own_attention(layer))
        for corrected in (
            clean.corrected_attention(layer),
            clean.corrected_attention(layer, "clean", clean),
            clean.corrected_attention(layer, "clean", clean_rows(family)),
        ):
            assert_close(corrected, rows, atol=1e-6, rtol=1e-6)
        own, shares = clean.attention_change(layer, clean)
        parts = (own.arithmetic, own.mechanism, own.removal, shares.shares, shares.arithmetic, shares.removal)
        assert all(float(part.abs().max()) < 1e-6 for part in parts)
        assert bool(clean.keep(layer).all())
    assert bool((clean.receipt.retained == 1).all())


@every_family
@pytest.mark.parametrize("name", ARMS)
def test_corrected_attention_is_the_own_row_under_the_mask(family, name, outcomes):
    """Ã′ = A′ R = N ⊙ A⁺, with N = e^bias; R is the receipt's."""
    out = outcomes(family)[name]
    table, queries = catalogue.table(name), out.trace.queries
    for layer in LAYERS:
        corrected = out.corrected_attention(layer)
        assert_close(corrected, out.own_attention(layer) * table[layer][:, queries].exp(), atol=1e-6, rtol=1e-4)
        retained = out.receipt.retained[layer][:, : len(queries), None]
        assert_close(corrected, out.attention(layer) * retained, atol=1e-6, rtol=1e-4)
        assert torch.equal(out.keep(layer), keep_table(name, layer, queries))
        assert bool((out.attention(layer)[~out.keep(layer)] == 0).all())


@every_family
@pytest.mark.parametrize("name", ARMS)
def test_the_clean_reference_is_what_the_clean_row_keeps(family, name, outcomes, clean_rows, plain):
    """Against transformers' clean rows: R = Σ N A, and what a learned sink holds."""
    out, clean = outcomes(family)[name], plain(family)(TOKENS).attention
    table, queries = catalogue.table(name), out.trace.queries
    for layer in LAYERS:
        rows = clean[layer][:, queries].double()
        rest = 1 - rows.sum(-1) if family == "gpt_oss" else 0.0
        share = (rows * table[layer][:, queries].double().exp()).sum(-1) + rest
        mine = out.corrected_attention(layer, "clean", clean_rows(family)).double()
        assert_close(mine, out.attention(layer).double() * share[..., None], atol=2e-5, rtol=1e-3)


@every_family
def test_at_the_first_masked_layer_both_references_agree(family, outcomes, clean_rows):
    out, clean = outcomes(family)["across the border"], clean_rows(family)
    assert_close(out.corrected_attention(0), out.corrected_attention(0, "clean", clean), atol=1e-6, rtol=1e-5)
    assert float((out.corrected_attention(2) - out.corrected_attention(2, "clean", clean)).abs().max()) > 1e-3


@every_family
@pytest.mark.parametrize("name", HARD)
def test_both_splits_add_up_exactly(family, name, outcomes, clean_rows, plain):
    out, queries = outcomes(family)[name], outcomes(family)[name].trace.queries
    before, after = (plain(family)(TOKENS, table).attention for table in (None, catalogue.table(name)))
    for layer in LAYERS:
        keep = keep_table(name, layer, queries)
        if any(index == layer for index, _, _ in out.receipt.silenced):
            with pytest.raises(TheoryError, match=r"retains no attention mass \(R = 0\)"):
                out.attention_change(layer, clean_rows(family))
            continue
        own, shares = out.attention_change(layer, clean_rows(family))
        change = (after[layer] - before[layer])[:, queries]
        gone = torch.where(keep, 0.0, before[layer][:, queries])
        for split in (own, shares):
            assert_close(split.total, change, atol=2e-5, rtol=1e-4)
            assert_close(split.removal, -gone, atol=1e-5, rtol=1e-4)
        assert bool((shares.arithmetic >= 0).all())
        for part in (own.arithmetic, own.mechanism, shares.shares, shares.arithmetic):
            assert bool((part.masked_select(~keep) == 0).all())
        if family != "gpt_oss":  # among survivors shares only move around (a learned sink would be one of them)
            assert float(shares.shares.sum(-1).abs().max()) < 1e-5


def outcome_of(logits, sink, bias, clean=None):
    """An outcome of one layer, six equal heads and one query whose logits are exactly these."""
    n = len(logits)
    query, keys = torch.ones(6, 1, 1), torch.tensor(logits)[None, :, None].expand(6, -1, -1)
    spec = LayerSpec(1.0, sink=None if sink is None else torch.full((6,), sink))
    data = LayerData(query, (keys,), (torch.zeros(6, n, 1),), spec)
    trace = Trace(torch.arange(n), [n - 1], [data], lambda index: torch.zeros(6, 1, 1))
    cuts = tuple(Cut(key, key + 1, Rows(0), -beta) for key, beta in bias.items())
    receipt = Receipt((), (), 0.0, 0, 0, torch.ones(1, 6, 1))
    return Outcome(
        torch.zeros(1, 4), [n - 1], torch.arange(n), receipt, [], trace, {0: ArmBias(cuts, 6)} if cuts else {}
    )


@pytest.mark.parametrize("sink", [None, -1.0, 0.5])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_corrections_keep_their_digits_beside_a_strong_key(sink, offset):
    """Key 0 holds all but e^-25 of the row: R comes from what is kept, a learned sink's own mass included."""
    sink = None if sink is None else sink + offset
    masked = outcome_of([25.0 + offset, offset, offset - 1], sink, {0: math.inf})
    clean = outcome_of([25.0 + offset, offset, offset - 1], sink, {})
    rest = 0.0 if sink is None else math.exp(sink - offset)
    everything = math.exp(25) + 1 + math.exp(-1) + rest
    expected = torch.tensor([0.0, 1 / everything, math.exp(-1) / everything]).expand(6, 1, 3)
    assert_close(masked.corrected_attention(0), expected, atol=0, rtol=1e-4)
    assert_close(masked.corrected_attention(0, "clean", clean), expected, atol=0, rtol=1e-4)
    _, shares = masked.attention_change(0, clean)
    assert float(shares.shares.abs().max()) < 1e-6
    survivors = torch.tensor([1.0, math.exp(-1)]) / (1 + math.exp(-1) + rest)
    assert_close(masked.attention(0)[0, 0, 1:], survivors, atol=1e-6, rtol=1e-5)
    assert_close(shares.arithmetic[0, 0, 1:], survivors, atol=1e-6, rtol=1e-5)


def test_a_finite_bias_is_corrected_by_its_weight_and_has_no_split():
    out, clean = outcome_of([2.0, 0.0, 1.0], None, {0: 0.5, 2: 3.0}), outcome_of([2.0, 0.0, 1.0], None, {})
    weights = torch.tensor([math.exp(-0.5), 1.0, math.exp(-3.0)])
    assert_close(out.corrected_attention(0), out.own_attention(0) * weights, atol=1e-7, rtol=1e-5)
    assert bool(out.keep(0).all())
    with pytest.raises(InterventionError, match="attention_change is defined for −∞ masks; this arm has a finite beta"):
        out.attention_change(0, clean)


def test_a_mistake_is_one_line(outcomes, tiny):
    out, clean = outcomes("llama")["after a span"], outcomes("llama")["clean"]
    for error, says, call in (
        ("reference", r"reference='mine' is not one of own, clean", lambda: out.corrected_attention(0, "mine")),
        ("clean", r"reference='clean' needs clean=", lambda: out.corrected_attention(0, "clean")),
        (
            "rows",
            r"do not cover this arm's queries \(missing \[5, 6, 7, 8, 9\]",
            lambda: out.attention_change(0, clean),
        ),
        ("keys", "keys 26", lambda: out.attention_change(0, observe(tiny("llama"), PROMPT, slice(None)))),
    ):
        with pytest.raises(InterventionError, match=says) as caught:
            call()
        assert "\n" not in str(caught.value), error

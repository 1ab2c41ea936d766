"""KeepMask: every head's own kept set, against plain transformers with a 4-D mask written by loops."""

import catalogue
import pytest
import tiny as families
import torch
from catalogue import CONTINUED, N
from torch.testing import assert_close

from kvprobe import KVMask, Prompt, intervene, prefill
from kvprobe.errors import InterventionError
from kvprobe.interventions import KeepMask

every_family = pytest.mark.parametrize("family", families.FAMILIES)
IDS = catalogue.ids()
PROMPT = Prompt.from_ids(IDS)
C = 17  # tokens of the compressed part


def random_keep(model, per_query_head, seed=0, share=0.5):
    geometry = model.geometry
    heads = geometry.n_heads if per_query_head else geometry.n_kv_heads
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(geometry.n_layers, heads, C, generator=generator) < share


def table_of(keep, model, total, first):
    """[L, H, total, total] by loops: every query from ``first`` on loses what is not kept."""
    geometry = model.geometry
    table = torch.zeros(geometry.n_layers, geometry.n_heads, total, total)
    for layer in range(geometry.n_layers):
        for head in range(geometry.n_heads):
            own = head if keep.shape[1] == geometry.n_heads else head // geometry.group
            for key in range(keep.shape[-1]):
                if not keep[layer, own, key]:
                    table[layer, head, first:, key] = -torch.inf
    return table


@every_family
@pytest.mark.parametrize("per_query_head", [False, True])
@pytest.mark.parametrize("queries", ["after", "suffix", "generated"])
def test_ragged_sets_are_a_4d_mask(family, per_query_head, queries, tiny, plain):
    model, suffix = tiny(family), 5
    keep = random_keep(model, per_query_head)
    first = {"after": C, "suffix": N - suffix, "generated": N}[queries]
    out = intervene(model, PROMPT, KeepMask(keep, queries), suffix=suffix, continuation=CONTINUED, generate=3)
    total = N + len(CONTINUED)
    reference = plain(family)([*IDS, *CONTINUED], table_of(keep, model, total, first))
    assert_close(out.logits, reference.logits[N - suffix :], atol=5e-5, rtol=1e-5)
    assert out.generated == plain(family).greedy(IDS, 3, lambda n: table_of(keep, model, n, first), {2})
    for layer in range(model.geometry.n_layers):
        mine = out.attention(layer)
        assert_close(mine, reference.attention[layer][:, total - mine.shape[1] :], atol=5e-5, rtol=1e-5)
    assert out.receipt.masked_weight == 0 and out.receipt.cells_reached == out.receipt.cells_expected


@every_family
def test_keep_all_is_bit_identical_in_the_same_batch(family, tiny):
    model = tiny(family)
    every = torch.ones(model.geometry.n_layers, model.geometry.n_kv_heads, C, dtype=torch.bool)
    nothing, all_kept, some = intervene(
        model, PROMPT, [(), KeepMask(every), KeepMask(random_keep(model, False))], suffix=N - C, continuation=CONTINUED
    )
    assert torch.equal(nothing.logits, all_kept.logits) and not torch.equal(nothing.logits, some.logits)
    assert all_kept.receipt.cells_expected == 0


@every_family
def test_batch_is_one_by_one(family, tiny):
    model, prefix = tiny(family), prefill(tiny(family), PROMPT, C)
    arms = [KeepMask(random_keep(model, seed % 2 == 0, seed, share)) for seed, share in enumerate((0.2, 0.5, 0.9))]
    together = intervene(model, PROMPT, arms, suffix=4, prefix=prefix)
    for arm, out in zip(arms, together, strict=True):
        alone = intervene(model, PROMPT, arm, suffix=4, prefix=prefix)
        assert_close(out.logits, alone.logits, atol=2e-5, rtol=0)
        assert_close(out.receipt.retained, alone.receipt.retained, atol=1e-5, rtol=0)


def test_the_same_entries_everywhere_are_a_kvmask(tiny):
    model = tiny("llama")
    keep = torch.ones(3, 2, C, dtype=torch.bool)
    keep[..., 3:9] = False
    mine, theirs = intervene(model, PROMPT, [KeepMask(keep), KVMask([(3, 9)], queries="suffix")], suffix=N - C)
    assert_close(mine.logits, theirs.logits, atol=1e-6, rtol=0)
    assert mine.receipt.cells_expected == theirs.receipt.cells_expected == 3 * 6 * 6 * (N - C)


def test_joined_with_a_mask_both_bite(tiny, plain):
    model, keep = tiny("llama"), random_keep(tiny("llama"), False)
    out = intervene(model, PROMPT, [(KeepMask(keep), KVMask([(2, 5), (18, 20)], heads=[1, 4]))], suffix=4)[0]
    table = table_of(keep, model, N, C)
    for start, stop in ((2, 5), (18, 20)):
        table[:, [1, 4], N - 4 :, start:stop] = -torch.inf
    assert_close(out.logits, plain("llama")(IDS, table).logits[N - 4 :], atol=5e-5, rtol=1e-5)


def test_left_pads_are_no_part_of_the_sets(tiny):
    model, keep = tiny("llama"), random_keep(tiny("llama"), False)
    padded = Prompt.from_ids([0, 0, 0, *IDS], attention_mask=[0, 0, 0, *[1] * N])
    plain_out = intervene(model, PROMPT, KeepMask(keep), suffix=4)
    out = intervene(model, padded, KeepMask(keep), suffix=4)
    assert_close(out.logits, plain_out.logits, atol=1e-6, rtol=0)
    assert out.positions == [position + 3 for position in plain_out.positions]


def test_an_evicted_row_that_nobody_needs_is_counted_as_unseen(tiny):
    """A window hides what is far away: evicting it there changes nothing, and the receipt says so."""
    model = tiny("mistral")
    keep = torch.ones(3, 2, C, dtype=torch.bool)
    keep[..., 0] = False
    clean, out = intervene(model, PROMPT, [(), KeepMask(keep)], suffix=4)
    assert out.receipt.unseen == {0: 1, 1: 1, 2: 1} and torch.equal(out.logits, clean.logits)


def test_losing_everything_is_refused_where_a_row_would_be_empty(tiny):
    keep = torch.zeros(3, 2, N, dtype=torch.bool)
    with pytest.raises(InterventionError, match=r"removes every key that query 20 sees \(layer 0, head 0\)"):
        intervene(tiny("llama"), PROMPT, KeepMask(keep, "suffix"), suffix=N - 20)


@pytest.mark.parametrize(
    ("keep", "queries", "message"),
    [
        (torch.ones(3, 2, C), "after", r"keep is torch.float32 \[3, 2, 17\]; allowed: a boolean tensor"),
        ([[True]], "after", r"keep is \[\[True\]\]; allowed: a boolean tensor"),
        (torch.ones(3, 2, dtype=torch.bool), "after", r"keep is torch.bool \[3, 2\]; allowed"),
        (
            torch.ones(3, 3, C, dtype=torch.bool),
            "after",
            r"shape \[3, 3, 17\]; allowed: \[3 layers, 2 \(kv\) or 6 heads",
        ),
        (torch.ones(2, 2, C, dtype=torch.bool), "after", r"shape \[2, 2, 17\]"),
        (torch.ones(3, 2, N + 1, dtype=torch.bool), "after", r"1 … 26 entries"),
        (torch.ones(3, 2, 0, dtype=torch.bool), "after", r"shape \[3, 2, 0\]"),
        (torch.ones(3, 2, C, dtype=torch.bool), "later", r"queries='later' is not one of suffix, after, generated"),
    ],
)
def test_what_does_not_fit_is_one_line(keep, queries, message, tiny):
    with pytest.raises(InterventionError, match=message) as error:
        intervene(tiny("llama"), PROMPT, KeepMask(keep, queries), suffix=4)
    assert "\n" not in str(error.value)


def test_suffix_rows_need_a_suffix(tiny):
    with pytest.raises(InterventionError, match="queries='suffix' needs suffix="):
        intervene(tiny("llama"), PROMPT, KeepMask(torch.zeros(3, 2, C, dtype=torch.bool), "suffix"))

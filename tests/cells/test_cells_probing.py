"""The probe row against plain transformers, for every probe; what is compressed, and what the scorers are told."""

import pytest
import small_documents as small
import torch
from tiny import FAMILIES
from torch.testing import assert_close

from kvprobe import cells, eviction
from kvprobe.cells import PROBES
from kvprobe.errors import EvictionError, PromptError
from kvprobe.prompts import Prompt

families = pytest.mark.parametrize("family", FAMILIES)
probes = pytest.mark.parametrize("kind", PROBES)


def bare(seed, n=25):
    return small.document(seed, n=n, stop=n)


def fitting_document(kind, seed=1, pad=0):
    return small.document(seed, n=25, stop=25, pad=pad) if kind == "next_token" else small.document(seed, pad=pad)


@families
@probes
def test_the_row_is_plain_transformers_row_of_that_query(family, kind, tiny, plain):
    model, doc = tiny(family), fitting_document(kind)
    found = cells.probe(model, doc, small.policies(), kind)
    ids, stop = small.whole(plain(family), doc, kind)
    assert found.prompt.ids.tolist() == ids and found.context_stop == stop and found.kind == kind
    assert found.trace.queries == [len(ids) - 1] and found.trace.n == len(ids)
    attention = plain(family)(ids).attention
    for view in found.trace.layers():
        assert_close(view.attention[:, 0], attention[view.index, :, -1], rtol=1e-3, atol=2e-5)


@families
def test_the_first_decoded_token_is_what_plain_transformers_decodes(family, tiny, plain):
    for seed in range(4):
        doc = small.document(seed)
        ids, _ = small.real(doc)
        found = cells.probe(tiny(family), doc, small.policies()[:1])
        assert found.prompt.ids.tolist() == [*ids, *plain(family).greedy(ids, 1, lambda n: None)]


@probes
def test_only_the_context_is_prefilled_exactly_and_scored(kind, tiny):
    model, doc = tiny("llama"), fitting_document(kind)
    found = cells.probe(model, doc, small.policies(), kind)
    ids, _ = small.real(doc)
    stop = 24
    assert found.context_stop == stop
    assert found.measured.prefix.ids.tolist() == ids[:stop]
    for policy in small.policies():
        scored = found.measured.scored(policy)
        assert {each.scores.shape[-1] for each in scored} == {stop}
        assert torch.equal(policy.choose(scored, "0.25").keep, policy.select(model, ids[:stop], "0.25"))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@probes
def test_left_pads_change_nothing(family, kind, tiny):
    """``context_stop`` counts a prompt's tokens as given, pads included."""
    model = tiny(family)
    policies = small.policies()
    arms = [cells.Arm(policy, "0.25") for policy in policies]
    one, other = (cells.probe(model, fitting_document(kind, pad=pad), policies, kind) for pad in (0, 3))
    assert other.prompt.ids.tolist()[3:] == one.prompt.ids.tolist()
    assert other.measured.prefix.ids.tolist() == one.measured.prefix.ids.tolist()
    tables = [cells.measure(each, arms, stages=True) for each in (one, other)]
    for name in ("heads", "layers"):
        mine, theirs = (getattr(table, name) for table in tables)
        assert mine.drop(columns="doc").equals(theirs.drop(columns="doc")), name


@probes
def test_the_oracle_is_told_what_follows_and_nothing_else(kind, tiny, monkeypatch):
    told, real = [], eviction.measure

    def spy(model, context, policies, *, future=None):
        told.append((torch.as_tensor(context).tolist(), future))
        return real(model, context, policies, future=future)

    monkeypatch.setattr("kvprobe.cells.probing.eviction.measure", spy)
    doc = fitting_document(kind)
    ids, _ = small.real(doc)
    for policies in ([eviction.policy("oracle"), *small.policies()], small.policies()):
        cells.probe(tiny("llama"), doc, policies, kind)
    assert told == [(ids[:24], ids[24:]), (ids[:24], None)]


def test_a_context_with_nothing_behind_it_is_answered_from_itself(tiny, plain):
    """No question: the probe row is the decoded token's, and everything before it is compressed."""
    doc = bare(3)
    found = cells.probe(tiny("llama"), doc, small.policies()[:1])
    ids, _ = small.whole(plain("llama"), doc)
    assert found.prompt.ids.tolist() == ids and found.context_stop == 25 == len(ids) - 1


@pytest.mark.parametrize(
    ("doc", "kind", "error", "said"),
    [
        (small.document(0), "answer", PromptError, "probe='answer'; allowed: first_decoded, last_prompt, next_token"),
        ("a text", "first_decoded", PromptError, "'a text' is no document"),
        (Prompt.from_ids([5, 6]), "first_decoded", PromptError, "is no document"),
        (small.document(0), "next_token", PromptError, "doc-0 has a question of 2 tokens behind 24"),
        (small.document(0, pad=3), "next_token", PromptError, "doc-0 has a question of 2 tokens behind 24"),
        (bare(0, n=1), "next_token", PromptError, "two tokens or more"),
        (bare(0), "last_prompt", PromptError, "doc-0 has no question"),
        (small.document(0, n=512, stop=500), "first_decoded", PromptError, "512"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_in_one_line(doc, kind, error, said, tiny):
    with pytest.raises(error, match=said) as caught:
        cells.probe(tiny("llama"), doc, small.policies()[:1], kind)
    assert "\n" not in str(caught.value)


def test_a_prompt_that_fills_the_model_fits_where_nothing_is_decoded(tiny):
    doc = small.document(0, n=512, stop=500)
    assert cells.fitting(tiny("llama"), doc, "last_prompt")[0] == 500


def test_an_oracle_needs_something_that_follows(tiny):
    """Known before anything is run: with no question nothing follows the context."""
    oracle = eviction.policy("oracle")
    with pytest.raises(EvictionError, match="oracle looks at the tokens after the context"):
        cells.probe(tiny("llama"), bare(0), [oracle])

"""Every answer of a run against the same thing done by hand: policy by policy, and plain transformers under a mask."""

import curve_runs
import pytest
import torch
from curve_runs import CACHES, GOLD, LENGTHS, STOPS
from torch.testing import assert_close

from kvprobe import curves, eviction, intervene
from kvprobe.curves import answers
from kvprobe.eviction import Chunked, KeepMask, chunked_prefill

every_case = pytest.mark.parametrize(("family", "index"), [("llama", 0), ("llama", 1), ("llama", 2), ("gemma2", 1)])
every_setting = pytest.mark.parametrize("setting", curves.SETTINGS)


@pytest.fixture(scope="module")
def found(tiny):
    """(family, setting, chunk) → index → (policy, cache) → answer; worked out once."""
    made = {}

    def get(family, setting, chunk, index):
        key = (family, setting, chunk, index)
        if key not in made:
            policies = curve_runs.policies(live=chunk is not None)
            asked = curve_runs.settings(policies=policies, setting=setting, chunk=chunk)
            result = curves.answer_item(tiny(family), asked, index)
            made[key] = {(each.policy, each.cache): each for each in result.answers}
            assert list(made[key]) == [("full", "1"), *((p.name, c) for p in policies for c in CACHES)]
        return made[key]

    return get


def parts(settings, index):
    """Real ids, compressed length and gold answer, from the item itself."""
    item = settings.item(None, index)
    ids = [token for token in item.prompt.ids.tolist()[-LENGTHS[index] :]]
    return item, ids, STOPS[index] if settings.setting == "context" else LENGTHS[index], GOLD[index]


def kept(model, policy, ids, stop, gold, cache):
    future = [*ids[stop:], *gold] if policy.scorer.needs_future else None
    return policy.select(model, ids[:stop], cache, future=future)


def forced(rows, gold):
    """Σ ln p of the gold tokens from the rows that predict them, in fp64."""
    return sum(float(row.double().log_softmax(-1)[token]) for row, token in zip(rows, gold, strict=True))


def plain_logprob(reference, geometry, ids, gold, keep, stop):
    """Plain transformers, one uncached run: every later query loses what is not kept, by loops."""
    total = len(ids) + len(gold)
    table = torch.zeros(geometry.n_layers, geometry.n_heads, total, total)
    for layer, held in enumerate(keep.tolist()):
        for head in range(geometry.n_heads):
            row = [0.0 if kept else -torch.inf for kept in held[head // geometry.group]]
            table[layer, head, stop:, :stop] = torch.tensor(row[:stop])
    logits = reference([*ids, *gold], table).logits
    return forced(logits[len(ids) - 1 : -1], gold)


@every_case
@every_setting
def test_gold_logprobs_are_plain_transformers_under_a_mask_by_loops(family, setting, index, found, tiny, plain):
    model, asked = tiny(family), curve_runs.settings(setting=setting)
    _, ids, stop, gold = parts(asked, index)
    mine = found(family, setting, None, index)
    every = torch.ones(model.geometry.n_layers, model.geometry.n_kv_heads, stop, dtype=torch.bool)
    expected = plain_logprob(plain(family), model.geometry, ids, gold, every, stop)
    assert mine["full", "1"].logprob == pytest.approx(expected, abs=3e-4)
    for policy in asked.policies:
        keep = kept(model, policy, ids, stop, gold, "0.5")
        answer = mine[policy.name, "0.5"]
        expected = plain_logprob(plain(family), model.geometry, ids, gold, keep, stop)
        assert answer.logprob == pytest.approx(expected, abs=3e-4)
        assert answer.kept == pytest.approx(keep.sum().item() / keep.numel()) and 0.4 < answer.kept <= 0.5


@every_case
@every_setting
def test_texts_scores_and_receipts_are_those_of_calls_by_hand(family, setting, index, found, tiny):
    model, asked = tiny(family), curve_runs.settings(setting=setting)
    item, ids, stop, gold = parts(asked, index)
    suffix = LENGTHS[index] - STOPS[index] if setting == "context" else 1
    for policy in asked.policies:
        for cache in CACHES[:2]:
            answer = found(family, setting, None, index)[policy.name, cache]
            keep = kept(model, policy, ids, stop, gold, cache)
            out = intervene(
                model, item.prompt, KeepMask(keep), suffix=suffix, continuation=gold, generate=len(gold) + 8
            )
            text = model.tokenizer.decode(out.generated, skip_special_tokens=True)
            assert answer.text == text
            assert answer.score == pytest.approx(sum(ref in text.lower() for ref in item.references) / 3)
            assert answer.smallest_retained == pytest.approx(out.receipt.smallest_retained, abs=1e-5)
            if cache == "0.5" and not policy.scorer.needs_future:
                made = eviction.generate(model, item.prompt, policy, cache, context=stop, tokens=len(gold) + 8)
                assert model.tokenizer.decode(made.ids, skip_special_tokens=True) == text


@every_case
@every_setting
def test_the_whole_cache_is_no_eviction_bit_for_bit(family, setting, index, found):
    """Exactly, not nearly: a change of the full cache must read 0."""
    mine = found(family, setting, None, index)
    full = mine["full", "1"]
    for policy in curve_runs.policies():
        answer = mine[policy.name, "1"]
        assert (answer.logprob, answer.text, answer.score) == (full.logprob, full.text, full.score)
        assert answer.kept == answer.smallest_retained == full.kept == 1.0


def test_joint_spares_the_first_answer_token_and_context_does_not(found, tiny):
    """The last prompt token is prefilled exactly in the joint setting: only what is generated sees the loss."""
    model = tiny("llama")
    for setting, same in (("joint", True), ("context", False)):
        asked = curve_runs.settings(setting=setting, policies=curve_runs.policies()[:1], caches=("0.5",))
        item = asked.item(model, 0)
        short = curve_runs.Small(policies=asked.policies, caches=("0.5",), setting=setting, new_tokens=1)
        full, evicted = curves.answer_item(model, short, 0).answers
        assert len(model.tokenizer.decode([1])) <= 3 and item.answer_ids == GOLD[0]
        first = intervene(model, item.prompt, [()], suffix=1, continuation=GOLD[0])[0].logits[0]
        keep = asked.policies[0].select(model, item.prompt.ids[: 26 if same else 20], "0.5")
        masked = intervene(model, item.prompt, KeepMask(keep), suffix=1 if same else 6, continuation=GOLD[0])
        assert torch.allclose(masked.logits[-4], first, atol=1e-5) is same
        assert (full.text == evicted.text) or not same


def diary_table(seen, geometry):
    """[L, H, n, n]: query q loses what had been evicted when it ran."""
    n = len(seen)
    table = torch.zeros(geometry.n_layers, geometry.n_heads, n, n)
    for query, keep in enumerate(seen):
        for layer, held in enumerate(keep.tolist()):
            for head in range(geometry.n_heads):
                row = [0.0 if kept else -torch.inf for kept in held[head // geometry.group]]
                table[layer, head, query, : len(row)] = torch.tensor(row)
    return table


@every_setting
@pytest.mark.parametrize(("family", "chunk"), [("llama", 8), ("llama", 13), ("llama", 40), ("gemma2", 8)])
def test_chunked_answers_are_chunked_prefill_and_generate_by_hand(family, setting, chunk, found, tiny):
    model, index = tiny(family), 0
    asked = curve_runs.settings(setting=setting, policies=curve_runs.policies(live=True), chunk=chunk)
    item, ids, stop, gold = parts(asked, index)
    for policy in asked.policies:
        for cache in CACHES[:2]:
            answer = found(family, setting, chunk, index)[policy.name, cache]
            made = eviction.generate(
                model, item.prompt, policy, cache, context=stop, tokens=len(gold) + 8, chunked=Chunked(chunk)
            )
            assert answer.text == model.tokenizer.decode(made.ids, skip_special_tokens=True)
            live = chunked_prefill(model, ids[:stop], policy, cache, chunk)
            assert answer.kept == pytest.approx(live.keep.float().mean().item())
            rows = live.feed(torch.tensor([*ids[stop:], *gold]))[: len(ids) - stop + len(gold) - 1]
            rows = torch.cat([made.logits[:1], rows[len(ids) - stop :]])  # the row before the first gold token
            assert answer.logprob == pytest.approx(forced(rows, gold), abs=3e-4)


@every_setting
@pytest.mark.parametrize("index", [0, 2])
def test_chunked_answers_are_plain_transformers_when_each_query_loses_what_was_gone(setting, index, found, tiny, plain):
    model, chunk = tiny("llama"), 8
    asked = curve_runs.settings(setting=setting, policies=curve_runs.policies(live=True), chunk=chunk)
    _, ids, stop, gold = parts(asked, index)
    for policy in asked.policies[:3]:
        live, seen = eviction.LiveCache(model, policy), []
        for start in range(0, stop, chunk):
            piece = torch.tensor(ids[start : min(start + chunk, stop)])
            seen += [live.keep.clone()] * len(piece)
            live.feed(piece)
            live.evict(int(live.length * 0.5))
        seen += [live.keep.clone()] * (len(ids) - stop + len(gold))
        logits = plain("llama")([*ids, *gold], diary_table(seen, model.geometry)).logits
        expected = forced(logits[len(ids) - 1 : -1], gold)
        assert found("llama", setting, chunk, index)[policy.name, "0.5"].logprob == pytest.approx(expected, abs=5e-4)


def test_chunks_are_another_experiment_and_the_semantics_says_which(found):
    whole, pieces = found("llama", "context", None, 0), found("llama", "context", 8, 0)
    assert whole["full", "1"].logprob == pytest.approx(pieces["full", "1"].logprob, abs=1e-4)
    assert all(abs(whole[name, "0.5"].logprob - pieces[name, "0.5"].logprob) > 1e-3 for name in ("snapkv", "streaming"))
    assert curve_runs.settings().semantics.startswith("prefill-then-evict: ")
    live = curve_runs.settings(policies=curve_runs.policies(live=True), chunk=8)
    assert live.semantics.startswith("chunked(8): ") and "later chunks" in live.semantics


@every_setting
def test_only_the_oracle_is_told_what_comes_after(setting, tiny, monkeypatch):
    told, real = [], eviction.measure

    def spy(model, context, policies, *, future=None):
        told.append((context.tolist(), list(future)))
        return real(model, context, policies, future=future)

    monkeypatch.setattr(answers.eviction, "measure", spy)
    *others, oracle = curve_runs.policies()
    for index in range(3):
        for policies in ((oracle, *others), tuple(others)):
            asked = curve_runs.settings(setting=setting, policies=policies)
            curves.answer_item(tiny("llama"), asked, index)
        _, ids, stop, gold = parts(asked, index)
        assert told[-2:] == [(ids[:stop], [*ids[stop:], *gold]), (ids[:stop], [])]


def test_the_oracle_beside_others_changes_nothing_for_them(tiny):
    *others, _ = curve_runs.policies()
    alone = curves.answer_item(tiny("llama"), curve_runs.settings(policies=tuple(others)), 0).answers
    beside = curves.answer_item(tiny("llama"), curve_runs.settings(), 0).answers
    for mine, theirs in zip(alone, beside, strict=False):
        assert (mine.policy, mine.cache, mine.text, mine.kept) == (
            theirs.policy,
            theirs.cache,
            theirs.text,
            theirs.kept,
        )
        assert_close(mine.logprob, theirs.logprob, atol=1e-4, rtol=0)


def test_decoded_length_is_what_was_asked_for(tiny):
    asked = curve_runs.settings(policies=curve_runs.policies()[:1], caches=("0.5",), new_tokens=3)
    item = asked.item(None, 0)
    keep = asked.policies[0].select(tiny("llama"), item.prompt.ids[:20], "0.5")
    out = intervene(tiny("llama"), item.prompt, KeepMask(keep), suffix=6, generate=3)
    mine = curves.answer_item(tiny("llama"), asked, 0).answers[1]
    assert mine.text == tiny("llama").tokenizer.decode(out.generated, skip_special_tokens=True)

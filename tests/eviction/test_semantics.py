"""Chunked prefill, eviction while writing, compacted caches: against plain transformers with a 4-D mask by loops."""

import catalogue
import pytest
import torch
from policies import LastRow, all_policies
from torch.testing import assert_close

from kvprobe import Prompt, eviction, intervene, prefill
from kvprobe.errors import EvictionError, InterventionError, PromptError
from kvprobe.eviction import Chunked, Decode, KeepMask, LiveCache, PackedCache, entries

IDS = catalogue.ids()
PROMPT = Prompt.from_ids(IDS)
N, C = len(IDS), 20
POLICIES = {
    name: policy
    for name, policy in all_policies().items()
    if not policy.scorer.aligned and not policy.scorer.needs_future and policy.name != "tova+two_stage"
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
UNIFORM = {
    name: policy
    for name, policy in POLICIES.items()
    if policy.budget.name == "uniform" or (policy.budget.name == "pyramid")
}
uniform_policy = pytest.mark.parametrize("policy", UNIFORM.values(), ids=UNIFORM.keys())


class Diary(LiveCache):
    """A live cache that notes what was there when each query ran."""

    def __init__(self, model, policy):
        super().__init__(model, policy)
        self.seen = []

    def feed(self, ids, rows=0):
        self.seen += [self.keep.clone()] * len(ids)
        return super().feed(ids, rows)


def table_of(seen, model):
    """[L, H, n, n]: query q loses what had been evicted when it ran."""
    geometry, n = model.geometry, len(seen)
    table = torch.zeros(geometry.n_layers, geometry.n_heads, n, n)
    for query, keep in enumerate(seen):
        for layer, held in enumerate(keep.tolist()):
            for head in range(geometry.n_heads):
                row = [0.0 if kept else -torch.inf for kept in held[head // geometry.group]]
                table[layer, head, query, : len(row)] = torch.tensor(row)
    return table


@every_policy
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_chunk_as_long_as_the_context_is_prefill_then_evict(family, policy, tiny):
    model = tiny(family)
    live = eviction.chunked_prefill(model, IDS[:C], policy, "0.5", C)
    assert torch.equal(live.keep, policy.select(model, IDS[:C], "0.5"))
    assert live.receipts == []


@every_policy
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("chunk", [7, 10])
def test_later_chunks_see_the_loss(family, policy, chunk, tiny, plain):
    """Every logit of every chunk is plain transformers' under the mask that the earlier evictions make."""
    if policy.scorer.rows(chunk) > chunk:
        pytest.fail("law table policies look at no more rows than a chunk has")
    model, diary, rows = tiny(family), Diary(tiny(family), policy), []
    for start in range(0, C, chunk):
        rows.append(diary.feed(torch.tensor(IDS[start : min(start + chunk, C)])))
        base = entries(diary.length, "0.8")
        choice = diary.evict(base)
        if policy.budget.name != "duo":
            assert int(choice.budgets.sum()) == int(diary.keep.sum()) == base * diary.keep[..., 0].numel()
        protected = policy.scorer.protected(diary._layer(0), choice.budgets[0])
        assert protected.sum() <= choice.budgets[0].sum()
    reference = plain(family)(IDS[:C], table_of(diary.seen, model))
    assert_close(torch.cat(rows), reference.logits, atol=1e-4, rtol=1e-4)
    assert len(diary.receipts) == (C - 1) // chunk or policy.budget.name == "duo"
    assert all(receipt.masked_weight == 0 for receipt in diary.receipts)


@uniform_policy
@pytest.mark.parametrize("chunk", [7, C])
def test_packed_is_masked(policy, chunk, tiny):
    model, rest = tiny("llama"), torch.tensor(IDS[C:])
    masked = eviction.chunked_prefill(model, IDS[:C], policy, "0.8", chunk)
    packed = eviction.chunked_prefill(model, IDS[:C], policy, "0.8", chunk, physical=True)
    assert isinstance(packed, PackedCache) and torch.equal(masked.keep, packed.keep)
    assert [keys.shape[1] for keys, _ in packed.layers] == masked.keep.sum(-1)[:, 0].tolist()
    assert packed.n_bytes < masked.n_bytes
    assert_close(packed.feed(rest), masked.feed(rest), atol=5e-4, rtol=0)
    for layer, positions in enumerate(packed.positions):
        for head, held in enumerate(positions):
            assert held.tolist() == masked.keep[layer, head].nonzero().flatten().tolist()


@every_policy
@pytest.mark.parametrize("interval", [1, 3])
def test_eviction_while_writing(policy, interval, tiny, plain):
    """Token for token what plain transformers writes when each step loses what had been evicted by then."""
    model, tokens = tiny("llama"), 8
    made = eviction.generate(model, PROMPT, policy, "0.6", context=C, tokens=tokens, decode=Decode(interval, target=13))
    diary = Diary(model, policy)
    diary.feed(torch.tensor(IDS[:C]))
    diary.evict(entries(C, "0.6"))
    last, ids, steps = diary.feed(torch.tensor(IDS[C:]))[-1], list(IDS), []
    reference = plain("llama")
    for step in range(tokens):
        truth = reference(ids, table_of(diary.seen, model)).logits[-1]
        assert_close(last, truth, atol=2e-4, rtol=1e-4)
        steps.append(truth)
        token = int(truth.argmax())
        if token in (2,):
            break
        ids.append(token)
        if step + 1 == tokens:
            break
        last = diary.feed(torch.tensor([token]))[-1]
        if (step + 1) % interval == 0 and int(diary.keep.sum(-1).max()) > 13:
            diary.evict(13)
            if policy.budget.name != "duo":
                assert int(diary.keep.sum()) == 13 * 6
    assert made.ids == ids[N:] and made.semantics == f"prefill-then-evict + decode({interval}, 13)"
    assert_close(made.logits, torch.stack(steps), atol=2e-4, rtol=1e-4)
    assert torch.equal(made.keep, diary.keep)


@pytest.mark.parametrize("name", ["snapkv", "adakv", "streaming", "knorm"])
def test_generate_is_intervene_with_a_keep_mask(name, tiny):
    model = tiny("llama")
    policy = eviction.policy(name, **({"window": 4} if "kv" in name and name != "knorm" else {}))
    keep = policy.select(model, IDS[:C], "0.5")
    out = intervene(model, PROMPT, KeepMask(keep), suffix=N - C, generate=6)
    made = eviction.generate(model, PROMPT, policy, "0.5", context=C, tokens=6)
    assert made.ids == out.generated and made.semantics == "prefill-then-evict"
    assert torch.equal(made.keep[..., :C], keep) and made.keep[..., C:].all()
    joint = eviction.generate(model, PROMPT, policy, "0.5", context=N, tokens=6)
    keep = policy.select(model, IDS, "0.5")
    assert joint.ids == intervene(model, PROMPT, KeepMask(keep), suffix=1, generate=6).generated


@uniform_policy
def test_compacted_is_masked(policy, tiny):
    model = tiny("llama")
    keep = policy.select(model, IDS[:C], "0.5")
    prefix = prefill(model, PROMPT, C)
    compacted = eviction.compact(model, prefix, keep)
    logits, written = eviction.continue_from(model, compacted, IDS[C:], generate=6)
    out = intervene(model, PROMPT, KeepMask(keep), suffix=N - C, generate=6, prefix=prefix)
    assert_close(logits, out.logits, atol=5e-4, rtol=0)
    assert written == out.generated
    assert compacted.n_bytes == keep.sum() * 2 * model.geometry.head_dim * 4 < prefix.n_bytes


@pytest.mark.slow
def test_compacted_is_masked_on_the_embedded_model(smol):
    prompt = Prompt.from_text(smol, "The harbour was quiet, and the tide came in slowly over the stones. " * 20)
    policy = eviction.policy("snapkv+pyramid+two_stage", beta=2)
    stop = len(prompt) - 12
    keep = policy.select(smol, prompt.ids[:stop], "0.4")
    assert len(set(keep.sum(-1).flatten().tolist())) > 1
    prefix = prefill(smol, prompt, stop)
    logits, written = eviction.continue_from(smol, eviction.compact(smol, prefix, keep), prompt.ids[stop:], generate=4)
    out = intervene(smol, prompt, KeepMask(keep), suffix=12, generate=4, prefix=prefix)
    assert_close(logits, out.logits, atol=5e-4, rtol=0)
    assert written == out.generated


def test_chunked_is_another_experiment(tiny):
    """The two semantics differ in what the later tokens are computed from, and the result names which it was."""
    model, policy = tiny("llama"), eviction.policy("snapkv", window=4)
    exact = eviction.generate(model, PROMPT, policy, "0.6", context=C, tokens=2)
    lossy = eviction.generate(model, PROMPT, policy, "0.6", context=C, tokens=2, chunked=Chunked(8))
    assert (exact.semantics, lossy.semantics) == ("prefill-then-evict", "chunked(8)")
    assert not torch.equal(exact.logits, lossy.logits) and not torch.equal(exact.keep, lossy.keep)


def test_keep_all_in_chunks_is_no_eviction(tiny):
    model, policy = tiny("llama"), eviction.policy("adakv", window=4)
    live = eviction.chunked_prefill(model, IDS[:C], policy, 1, 7)
    assert live.keep.all()
    clean = intervene(model, PROMPT, [()], suffix=N - C)[0]
    assert_close(live.feed(torch.tensor(IDS[C:])), clean.logits, atol=5e-5, rtol=1e-5)


@every_policy
@pytest.mark.parametrize("target", [12, 13, 15, 17, 40])
def test_targets_between_the_mean_and_the_largest_head(policy, target, tiny):
    """Whatever the budgets: what can be brought down is brought down, the rest waits, and nothing is lost."""
    made = eviction.generate(tiny("llama"), PROMPT, policy, "0.5", context=C, tokens=9, decode=Decode(2, target))
    held = made.keep.sum(-1).float()
    if policy.budget.name == "uniform":
        assert (held <= max(target + 2, 10 + N - C + 1)).all()
    assert len(made.ids) <= 9 and torch.isfinite(made.logits).all()


def test_more_than_is_there_is_refused(tiny):
    live = LiveCache(tiny("llama"), eviction.policy("adakv", window=4))
    with pytest.raises(EvictionError, match="5 entries a head are more than what is there "):
        live.evict(5)
    live.feed(torch.tensor(IDS[:C]))
    live.evict(10)
    with pytest.raises(EvictionError, match=r"11 entries a head are more than what is there .*allowed: what adakv can"):
        live.evict(11)
    for wrong in (2.5, 0, True, "8"):
        with pytest.raises(InterventionError, match="give a whole number, 1 or more"):
            live.evict(wrong)
    for wrong, message in (([], "no token is fed"), (torch.zeros(0, dtype=torch.int64), "no token is fed")):
        with pytest.raises(EvictionError, match=message):
            live.feed(wrong)
    with pytest.raises(PromptError, match="do not fit the model's context of 512"):
        live.feed([5] * 500)


def test_a_live_cache_knows_its_tokens(tiny):
    """Another prompt's prefix would pass every receipt: the cache hands out its own ids, and intervene compares."""
    model = tiny("llama")
    live = eviction.chunked_prefill(model, IDS[:C], eviction.policy("snapkv", window=4), "0.5", 8)
    assert live.prefix().ids.tolist() == IDS[:C]
    out = intervene(model, PROMPT, KeepMask(live.keep), suffix=N - C, prefix=live.prefix())
    assert_close(out.logits, live.feed(IDS[C:]), atol=5e-5, rtol=1e-5)
    with pytest.raises(PromptError, match="prefilled from other tokens"):
        intervene(model, Prompt.from_ids(IDS[::-1]), KeepMask(live.keep[..., :C]), suffix=N - C, prefix=live.prefix())
    packed = eviction.chunked_prefill(model, IDS[:C], eviction.policy("snapkv", window=4), "0.5", 8, physical=True)
    with pytest.raises(EvictionError, match="a packed cache is no prefix"):
        packed.prefix()


def test_notes_of_several_evictions(tiny):
    """A share is of all tokens seen, not of what an earlier chunk has left; a fallback once is a fallback."""
    duo = eviction.policy("duo", gates=[[0.1, 0.9], [0.5, 0.2], [0.8, 0.3]], sinks=1, recent=4)
    live = eviction.chunked_prefill(tiny("llama"), IDS, duo, "0.5", 7)
    assert live.notes["share"] == pytest.approx(float(live.keep.float().mean()))
    ramp = LiveCache(tiny("llama"), eviction.policy("pyramid", beta=3, window=4))
    ramp.feed(IDS[:10])
    ramp.evict(8)
    assert ramp.notes == {"fallback": True}
    ramp.feed(IDS[10:])
    ramp.evict(13)
    assert ramp.notes == {"fallback": True}


def run(model, policy, **options):
    options = {"context": C, "tokens": 2} | options
    return eviction.generate(model, PROMPT, policy, "0.5", **options)


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (eviction.policy("adakv", window=4), {"physical": True}, "heads keep .*ragged budgets run as masks"),
        (eviction.policy("defensivekv", window=4), {"chunked": Chunked(9)}, "defensivekv compares heads"),
        (eviction.policy("oracle"), {}, "oracle looks at the tokens after the context|oracle knows what comes after"),
        (
            eviction.policy("snapkv", window=4, granularity="query_head"),
            {"chunked": Chunked(9)},
            "a cache holds kv heads, not query heads",
        ),
        (eviction.policy("tova+two_stage"), {"chunked": Chunked(8)}, "tova scores all heads alike, and under tova"),
        (eviction.policy("snapkv"), {}, "looks at the last 32 queries and the context has 20 tokens"),
        (eviction.policy("snapkv", window=12), {}, "10 of 20 entries are fewer than the 12 that snapkv always keeps"),
        (eviction.policy("snapkv", window=4), {"chunked": Chunked(4)}, "2 of 4 entries are fewer than the 4"),
        (eviction.policy("snapkv", window=6), {"chunked": Chunked(5)}, "last 6 queries, and 5 tokens are known"),
    ],
)
def test_what_cannot_be_done_is_one_line(policy, options, message, tiny):
    with pytest.raises(EvictionError, match=message) as error:
        run(tiny("llama"), policy, **options)
    assert "\n" not in str(error.value)


def test_windows_are_not_compacted(tiny):
    policy = eviction.policy("snapkv", window=4)
    with pytest.raises(EvictionError, match="sliding-window layers"):
        run(tiny("mistral"), policy, physical=True)
    with pytest.raises(EvictionError, match="sliding-window layers"):
        keep = policy.select(tiny("mistral"), IDS[:C], "0.5")
        eviction.compact(tiny("mistral"), prefill(tiny("mistral"), PROMPT, C), keep)


def test_numbers_that_are_none(tiny):
    for wrong in ({"tokens": 0}, {"context": 0}, {"context": N + 1}):
        with pytest.raises(InterventionError, match="is not allowed: give a whole number"):
            run(tiny("llama"), eviction.policy("streaming"), **wrong)
    for make in (lambda: Chunked(0), lambda: Decode(0, 3), lambda: Decode(2, True), lambda: Chunked("8")):
        with pytest.raises(EvictionError, match="allowed: a whole number ≥ 1"):
            make()
    compacted = eviction.compact(
        tiny("llama"), prefill(tiny("llama"), PROMPT, C), torch.ones(3, 2, C, dtype=torch.bool)
    )
    for wrong in ({"chunked": 8}, {"decode": (1, 2)}):
        with pytest.raises(EvictionError, match=r"allowed: (Chunked|Decode)"):
            run(tiny("llama"), eviction.policy("streaming"), **wrong)
    prefix = prefill(tiny("llama"), PROMPT, C)
    for wrong in ((prefix, compacted.layers), (None, torch.ones(3, 2, C, dtype=torch.bool)), (prefix, [[True]])):
        with pytest.raises(EvictionError, match="allowed: what prefill"):
            eviction.compact(tiny("llama"), *wrong)
    with pytest.raises(EvictionError, match="is no compacted cache"):
        eviction.continue_from(tiny("llama"), None, [5])
    for wrong in (1.5, -1, True):
        with pytest.raises(InterventionError, match=r"generate=.* is not allowed"):
            eviction.continue_from(tiny("llama"), compacted, [5], generate=wrong)
    with pytest.raises(EvictionError, match="no token follows"):
        eviction.continue_from(tiny("llama"), compacted, [])
    with pytest.raises(EvictionError, match=r"keep is torch.bool \[3, 6, 20\]; allowed: torch.bool \[3, 2, 20\]"):
        eviction.compact(tiny("llama"), prefill(tiny("llama"), PROMPT, C), torch.ones(3, 6, C, dtype=torch.bool))


def test_a_third_party_scorer_runs_live(tiny):
    live = eviction.chunked_prefill(tiny("llama"), IDS[:C], eviction.policy(LastRow()), "0.5", 6)
    assert (live.keep.sum(-1) == 10).all()

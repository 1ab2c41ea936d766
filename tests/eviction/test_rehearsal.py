"""A rehearsal refuses exactly what the policy itself would refuse of a context of that size."""

import catalogue
import pytest
from policies import all_policies, future_of

from kvprobe import engine, eviction
from kvprobe.errors import EvictionError
from kvprobe.eviction.rehearsal import rehearse

every_policy = pytest.mark.parametrize("policy", all_policies().values(), ids=all_policies())
CACHES = ("0.05", "0.2", "0.5", "1")


def real(model, policy, n, cache):
    """The policy's own refusal, or None."""
    try:
        policy.select(model, catalogue.ids(1, n), cache, future=future_of(policy))
    except EvictionError as error:
        return str(error)
    return None


def rehearsed(model, policy, n, cache):
    try:
        rehearse(model, [policy], n, cache)
    except EvictionError as error:
        return str(error)
    return None


@pytest.mark.slow
@every_policy
def test_it_refuses_what_the_policy_refuses_and_nothing_else(policy, tiny):
    model = tiny("llama")
    for n in (5, 6, 12, 40):
        for cache in CACHES:
            own, early = real(model, policy, n, cache), rehearsed(model, policy, n, cache)
            if n * float(cache) < 1 - 1e-9:  # duo's heads hold what they hold, whatever the share
                assert early is not None and (own is not None or policy.budget.name == "duo")
                continue
            assert (own is None) == (early is None), (n, cache, own, early)


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_geometries(family, tiny):
    for policy in (
        eviction.policy("snapkv", window=4, kernel=3),
        eviction.policy("adakv+two_stage", window=4, kernel=3),
    ):
        for cache in CACHES:
            assert (real(tiny(family), policy, 12, cache) is None) == (
                rehearsed(tiny(family), policy, 12, cache) is None
            )


def test_nothing_is_run(tiny, monkeypatch):
    model = tiny("llama")

    def forward(*given, **more):
        raise AssertionError("the model ran")

    monkeypatch.setattr(engine, "prefill", forward)
    rehearse(model, list(all_policies().values()), 500, "0.5")
    # 128K tokens of a real model's size would not fit; a blank layer is a handful of numbers
    rehearse(model, [eviction.policy("snapkv+two_stage")], 400, "0.2")


def test_the_message_says_which_share_and_where(tiny):
    policy = eviction.policy("snapkv", window=8, kernel=3)
    with pytest.raises(EvictionError, match=r"^cache 0\.2 in the first chunk: 4 of 20 entries are fewer than the 8"):
        rehearse(tiny("llama"), [policy], 20, "0.2", " in the first chunk")
    with pytest.raises(EvictionError, match=r"^cache 0\.01 of 20 tokens is no entry at all; allowed: at least 0\.05"):
        rehearse(tiny("llama"), [policy], 20, "0.01")
    with pytest.raises(EvictionError, match="looks at the last 8 queries and the context has 7 tokens"):
        rehearse(tiny("llama"), [policy], 7, "0.5")


def test_the_first_policy_that_cannot_is_named(tiny):
    fine, wide = eviction.policy("tova"), eviction.policy("snapkv", window=12, kernel=3, label="wide")
    with pytest.raises(EvictionError, match="always keeps") as caught:
        rehearse(tiny("llama"), [fine, wide], 20, "0.5")
    assert "wide" in str(caught.value)
    rehearse(tiny("llama"), [fine], 20, "0.5")

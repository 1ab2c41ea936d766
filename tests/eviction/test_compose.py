"""policy(): names, objects and settings; every refusal is one line with the reason."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from policies import GATES, IMPORTANCE, LastRow

from kvprobe import eviction
from kvprobe.errors import EvictionError
from kvprobe.eviction import BUDGETS, SCORERS, SELECTORS, Budget, Policy, TwoStage
from kvprobe.eviction.compose import settings_of
from kvprobe.eviction.scorers import SnapKV, Streaming


@pytest.mark.parametrize(
    ("given", "name", "parts"),
    [
        ("snapkv", "snapkv", ("snapkv", "uniform", "topk")),
        ("two_stage", "snapkv+two_stage", ("snapkv", "uniform", "two_stage")),
        ("adakv", "snapkv+adakv", ("snapkv", "adakv", "topk")),
        (" two_stage + h2o", "h2o+two_stage", ("h2o", "uniform", "two_stage")),
        ("adakv+two_stage+tova", "tova+adakv+two_stage", ("tova", "adakv", "two_stage")),
        ("pyramid", "snapkv+pyramid", ("snapkv", "pyramid", "topk")),
        ("defensivekv", "defensivekv", ("defensivekv", "layer_global", "topk")),
        ("defensivekv+uniform", "defensivekv+uniform", ("defensivekv", "uniform", "topk")),
    ],
)
def test_names(given, name, parts):
    policy = eviction.policy(given)
    assert policy.name == name
    assert (policy.scorer.name, policy.budget.name, policy.selector.name) == parts
    assert eviction.policy(name) == policy


@pytest.mark.parametrize("name", [*SCORERS])
def test_every_scorer_by_name(name):
    policy = eviction.policy(name)
    assert type(policy.scorer) is SCORERS[name] and policy.budget.name == policy.scorer.default_budget


def test_the_example_of_the_docstring():
    policy = eviction.policy(
        "snapkv",
        window=32,
        pool="max",
        kernel=7,
        budget="adakv",
        selector="two_stage",
        alpha=0.5,
        granularity="kv_head",
    )
    assert policy == Policy(SnapKV(32, "max", 7), BUDGETS["adakv"](), TwoStage(alpha=0.5))
    assert policy.to_dict() == {
        "name": "snapkv+adakv+two_stage",
        "scorer": {"name": "snapkv", "window": 32, "pool": "max", "kernel": 7},
        "budget": {"name": "adakv", "safeguard": 0.2},
        "selector": {
            "name": "two_stage",
            "alpha": 0.5,
            "epsilon": 1e-4,
            "p": 1,
            "group": "mean_of_means",
            "centred": 0,
        },
        "granularity": "kv_head",
        "seed": 0,
    }


def test_presets_and_settings_go_where_they_belong():
    released = eviction.policy("snapkv+two_stage", preset="released", epsilon=0.01)
    assert released.scorer == SnapKV(32, "avg", 5) and released.selector.epsilon == 0.01
    assert eviction.policy("snapkv", preset="paper") == eviction.policy("snapkv")
    assert eviction.policy("snapkv", preset="released", kernel=9).scorer.kernel == 9
    labelled = eviction.policy("snapkv", preset="released", label="snapkv (average 5)")
    assert labelled.name == "snapkv (average 5)" and labelled.scorer == released.scorer
    assert settings_of("adakv+two_stage") == {
        *("window", "pool", "kernel", "safeguard", "alpha", "epsilon", "p", "group", "centred")
    }


def test_duo_streams_with_its_own_sinks():
    duo = eviction.policy("duo", gates=GATES)
    assert duo.name == "streaming+duo" and duo.scorer == Streaming(sinks=128) and duo.budget.sinks == 128
    small = eviction.policy("duo", gates=GATES, sinks=3, recent=5)
    assert small.scorer.sinks == small.budget.sinks == 3


def test_objects():
    budget = BUDGETS["headkv"](IMPORTANCE)
    policy = eviction.policy(LastRow(), budget=budget, selector=TwoStage(p=2))
    assert policy.name == "last_row+headkv+two_stage" and policy.budget is budget
    assert "importance" in policy.to_dict()["budget"]


@dataclass(frozen=True)
class Half(Budget):
    """A third party's budget."""

    name: ClassVar[str] = "half"

    def allocate(self, request):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            "snapvk",
            {},
            "no policy part 'snapvk'; allowed: scorers snapkv, .*; budgets uniform, .*; selectors topk, two_",
        ),
        ("", {}, "no policy part ''; allowed"),
        ("snapkv+knorm", {}, "'snapkv\\+knorm' names two scorers; allowed: one"),
        ("snapkv+adakv", {"budget": "pyramid"}, "names a budget, and budget='pyramid' another"),
        ("snapkv", {"budget": "adakvv"}, "no budget 'adakvv'; allowed: uniform, adakv"),
        ("snapkv", {"selector": 3}, "3 is no selector; allowed: an object made from Selector"),
        (3, {}, "3 is no scorer"),
        (SnapKV, {"windows": 3}, "no setting 'windows'"),
        (
            "snapkv",
            {"alpha": 0.5},
            "snapkv\\+uniform\\+topk has no setting 'alpha'; allowed: kernel, pool, window, gran",
        ),
        ("knorm", {"preset": "released"}, "knorm does not pool, so that preset= chooses nothing"),
        ("h2o_256", {"preset": "released"}, "h2o_256 does not pool"),
        ("two_stage", {"alpha": True}, "alpha=True; allowed"),
        ("two_stage", {"epsilon": True}, "epsilon=True; allowed"),
        ("two_stage", {"p": True}, "p=True; allowed"),
        ("random", {"seed": "a"}, "seed='a'; allowed: a whole number"),
        ("random", {"label": " "}, "label=' '; allowed: a text"),
        ("snapkv", {"preset": "kvpress"}, "preset='kvpress'; allowed: paper, released"),
        ("snapkv", {"granularity": "layer"}, "granularity='layer'; allowed: kv_head, query_head"),
        ("snapkv", {"window": 0}, "window=0; allowed: a whole number ≥ 1"),
        ("snapkv", {"kernel": 4}, "kernel=4; allowed: an odd whole number"),
        ("snapkv", {"pool": "mean"}, "pool='mean'; allowed: avg, max, none"),
        ("two_stage", {"alpha": 1.2}, "alpha=1.2; allowed: a share between 0 and 1"),
        ("two_stage", {"epsilon": -1}, "epsilon=-1; allowed: a number ≥ 0"),
        ("two_stage", {"p": 3}, "p=3; allowed: 1, 2"),
        ("two_stage", {"group": "mean"}, "group='mean'; allowed: mean_of_means, bound"),
        ("two_stage", {"centred": -1}, "centred=-1; allowed"),
        ("two_stage", {"centred": 1, "group": "bound"}, "two different value terms"),
        ("knorm+two_stage", {}, "knorm has no first stage for two_stage: its scores are not attention"),
        ("streaming+two_stage", {}, "streaming has no first stage"),
        ("random+two_stage", {}, "random has no first stage"),
        ("expected_attention+two_stage", {}, "expected_attention already contains the values"),
        ("obcache+two_stage", {}, "obcache already contains the values"),
        ("defensivekv+two_stage", {}, "defensivekv already contains the values"),
        ("random+adakv", {}, "adakv compares scores between heads, and those of random are not"),
        ("knorm+layer_global", {}, "layer_global compares scores between heads"),
        ("snapkv+duo", {"gates": GATES}, "duo's heads hold sinks and recent tokens, or everything; allowed: streaming"),
        ("duo", {"gates": GATES, "granularity": "query_head"}, "duo's gates belong to kv heads"),
        ("defensivekv", {"granularity": "query_head"}, "defensivekv's scores belong to kv heads"),
        ("duo", {}, "duo needs gates=…"),
        ("headkv", {}, "headkv needs importance=…"),
    ],
)
def test_what_makes_no_sense_is_one_line(given, options, message):
    with pytest.raises(EvictionError, match=message) as error:
        eviction.policy(given, **options)
    assert "\n" not in str(error.value)


def test_streaming_with_other_sinks_than_its_budget_is_no_duo():
    with pytest.raises(EvictionError, match="allowed: a scorer and a budget of the same sinks"):
        eviction.policy(Streaming(sinks=4), budget=BUDGETS["duo"](GATES))


def test_names_of_all_parts():
    scorers = "snapkv h2o h2o_256 tova streaming knorm expected_attention defensivekv obcache random oracle"
    assert " ".join(SCORERS) == scorers
    assert " ".join(BUDGETS) == "uniform adakv pyramid headkv duo layer_global"
    assert " ".join(SELECTORS) == "topk two_stage"


def test_scores_with_nan_are_refused(tiny):
    class Broken(LastRow):
        name = "broken"

        def score(self, layer):
            return torch.full((layer.n_heads, layer.n), torch.nan)

    with pytest.raises(EvictionError, match="broken gave NaN on layer 0"):
        eviction.policy(Broken()).select(tiny("llama"), [5, 6, 7, 8], 0.5)

    class Wide(LastRow):
        name = "wide"

        def score(self, layer):
            return torch.zeros(layer.n_heads, layer.n + 1)

    with pytest.raises(EvictionError, match=r"scores of shape \[6, 5\]; allowed: \[6, 4\] per query head or \[2, 4\]"):
        eviction.policy(Wide()).select(tiny("llama"), [5, 6, 7, 8], 0.5)


def test_contexts_that_are_none(tiny):
    policy = eviction.policy("streaming")
    for wrong, message in (([], "the context is empty"), ("text", "is no context"), ([1, -2], "is no context")):
        with pytest.raises(EvictionError, match=message):
            policy.select(tiny("llama"), wrong, 0.5)
    with pytest.raises(EvictionError, match="is no policy; allowed"):
        eviction.measure(tiny("llama"), [5, 6, 7], ["snapkv"])
    seen = eviction.measure(tiny("llama"), [5, 6, 7, 8, 9], [policy])
    with pytest.raises(EvictionError, match="tova was not among the policies measured"):
        seen.scored(eviction.policy("tova"))

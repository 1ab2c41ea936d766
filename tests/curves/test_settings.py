"""What a run is asked for: words of the command line, and refusals before anything is computed."""

import curve_runs
import pytest
import torch

from kvprobe import curves, eviction
from kvprobe.curves import Settings
from kvprobe.curves.settings import from_command
from kvprobe.errors import DataError, EvictionError, KVProbeError, PromptError, TaskError

SNAPKV = (eviction.policy("snapkv", **curve_runs.SMALL),)
GIVEN = {
    "task": "niah_single_1",
    "policies": "snapkv, adakv+two_stage,random",
    "cache": "0.1, 0.25",
    "length": 900,
    "items": 2,
    "seed": 3,
    "setting": "joint",
    "template": "criticalkv",
} | dict.fromkeys(("chunk", "preset", "alpha", "epsilon", "profile", "gates", "haystack", "new_tokens"))


def asked(**more):
    return from_command(GIVEN | more)


def test_settings_from_the_command_line(tmp_path):
    found = asked()
    assert found.names == ["snapkv", "snapkv+adakv+two_stage", "random"] and found.caches == ("0.1", "0.25")
    assert (found.task, found.length, found.items, found.seed) == ("niah_single_1", 900, 2, 3)
    assert (found.setting, found.chunk, found.new_tokens) == ("joint", None, None)
    assert found.options == {"template": "criticalkv"} and [each.seed for each in found.policies] == [3, 3, 3]
    more = asked(chunk=64, new_tokens=5, haystack=tmp_path / "texts")
    assert (more.chunk, more.new_tokens, more.options["path"]) == (64, 5, str(tmp_path / "texts"))


def test_each_setting_goes_to_the_policies_that_have_it():
    found = asked(alpha=0.25, epsilon=0.01, preset="released", policies="snapkv,snapkv+two_stage,streaming")
    plain, staged, streaming = found.policies
    assert (staged.selector.alpha, staged.selector.epsilon) == (0.25, 0.01)
    assert {(each.scorer.pool, each.scorer.kernel) for each in (plain, staged)} == {("avg", 5)}
    assert streaming == eviction.policy("streaming", seed=3)


def test_stage_2_s_epsilon_and_the_pooling_preset_stay_where_they_belong():
    """Other parts have settings of the same name: an ε of their own, a window that is no observation window."""
    found = asked(policies="expected_attention,h2o_256,snapkv+two_stage", epsilon=0.01, preset="paper")
    assert found.policies[0] == eviction.policy("expected_attention", seed=3)
    assert found.policies[1] == eviction.policy("h2o_256", seed=3) and found.policies[1].scorer.window == 256
    assert found.policies[2].selector.epsilon == 0.01


def test_profiles_and_gates_are_read_from_files(tmp_path):
    scores = [[float(head + 1) for head in range(6)] for _ in range(3)]
    profile = eviction.budgets.HeadProfile("tiny", "retrieval", scores)
    eviction.budgets.write_profile(profile, tmp_path / "heads.json")
    (tmp_path / "gates.tsv").write_text("0.1\t0.9\n0.5\t0.2\n0.8\t0.3\n")
    found = asked(policies="headkv,duo", profile=tmp_path / "heads.json", gates=tmp_path / "gates.tsv")
    headkv, duo = found.policies
    assert headkv.budget.importance == tuple(map(tuple, scores))
    assert duo.budget.gates == ((0.1, 0.9), (0.5, 0.2), (0.8, 0.3)) and duo.name == "streaming+duo"


def test_one_profile_serves_both_unless_gates_are_given(tmp_path):
    scores = [[0.5, 1.0, 0.0, 2.0, 0.0, 0.0]] * 3
    path = tmp_path / "heads.json"
    eviction.budgets.write_profile(eviction.budgets.HeadProfile("tiny", "retrieval", scores), path)
    (tmp_path / "gates.tsv").write_text("0.1\t0.9\n" * 3)
    headkv, duo = asked(policies="headkv,duo", profile=path).policies
    assert headkv.budget.importance == tuple(map(tuple, scores))
    assert duo.budget.gates == ((0.25, 0.5, 0.0, 1.0, 0.0, 0.0),) * 3
    (alone,) = asked(policies="duo", profile=path).policies
    assert alone == duo and asked(policies="duo", profile=path).profile == str(path)
    both = asked(policies="headkv,duo", profile=path, gates=tmp_path / "gates.tsv").policies
    assert both[0] == headkv and both[1].budget.gates == ((0.1, 0.9),) * 3
    with pytest.raises(EvictionError, match="none of duo has the setting profile"):
        asked(policies="duo", profile=path, gates=tmp_path / "gates.tsv")


def one_line(error):
    assert "\n" not in str(error.value) and len(str(error.value)) < 420


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"policies": "snapkw"}, EvictionError, r"no policy part 'snapkw'; allowed: scorers snapkv, .*two_stage"),
        ({"policies": "snapkv+"}, EvictionError, "no policy part ''"),
        ({"policies": "snapkv+h2o"}, EvictionError, "names two scorers; allowed: one"),
        ({"policies": "streaming+two_stage"}, EvictionError, "streaming has no first stage"),
        ({"policies": " , "}, EvictionError, "no policy or no cache ratio was given"),
        ({"policies": " , ", "alpha": 0.5}, EvictionError, "no policy or no cache ratio was given"),
        ({"policies": "snapkv,streaming,snapkv"}, EvictionError, "policy snapkv is given twice; allowed: each once"),
        ({"policies": "snapkv+adakv,adakv"}, EvictionError, "policy snapkv.adakv is given twice"),
        ({"cache": ""}, EvictionError, "no policy or no cache ratio was given"),
        ({"cache": "0"}, EvictionError, "cache ratio '0'; allowed: a share to keep, 0 < ratio ≤ 1"),
        ({"cache": "0.2,1.5"}, EvictionError, "cache ratio '1.5'; allowed"),
        ({"cache": "-0.2"}, EvictionError, "cache ratio '-0.2'; allowed"),
        ({"cache": "half"}, EvictionError, "cache ratio 'half'; allowed"),
        ({"cache": "nan"}, EvictionError, "cache ratio 'nan'; allowed"),
        ({"cache": "1/0"}, EvictionError, "cache ratio '1/0'; allowed"),
        ({"cache": "20%"}, EvictionError, "cache ratio '20%'; allowed"),
        ({"cache": "0.1,0.2,0.1"}, EvictionError, "cache ratio 0.1 is given twice; allowed: each once"),
        ({"cache": "0.1,0.10"}, EvictionError, "cache ratio 0.1 = 0.10 is given twice"),
        ({"cache": "1/5,0.2"}, EvictionError, "cache ratio 1/5 = 0.2 is given twice"),
        ({"task": "niah_single_9"}, TaskError, "no task 'niah_single_9', must be one of niah_single_1"),
        ({"setting": "later"}, TaskError, "setting is 'later', must be one of context, joint"),
        ({"alpha": 1.5}, EvictionError, "alpha=1.5; allowed: a share between 0 and 1"),
        ({"alpha": float("nan")}, EvictionError, "alpha=nan; allowed"),
        ({"epsilon": -1.0}, EvictionError, "epsilon=-1.0; allowed: a number ≥ 0"),
        ({"preset": "thesis"}, EvictionError, "preset='thesis'; allowed: paper, released"),
        ({"alpha": 0.5, "policies": "snapkv,random"}, EvictionError, "none of snapkv, random has the setting alpha"),
        ({"epsilon": 0.1, "policies": "expected_attention"}, EvictionError, "none of expected_attention has .*epsilon"),
        ({"preset": "paper", "policies": "random"}, EvictionError, "none of random has the setting preset"),
        ({"profile": "x.json"}, EvictionError, "none of snapkv, .* has the setting profile"),
        ({"gates": "x.tsv"}, EvictionError, "none of snapkv, .* has the setting gates"),
        ({"policies": "snapkv,headkv"}, EvictionError, "headkv needs to know its heads; allowed: .*--profile FILE"),
        ({"policies": "duo"}, EvictionError, "duo needs to know its heads; allowed: duo with --gates FILE"),
        ({"policies": "headkv", "profile": "no/such.json"}, DataError, "cannot read no/such.json: No such file"),
        ({"policies": "duo", "gates": "no/such.tsv"}, DataError, "cannot read no/such.tsv: No such file"),
    ],
)
def test_words_that_make_no_run_are_one_line(change, error, said):
    with pytest.raises(error, match=said) as found:
        asked(**change)
    one_line(found)


@pytest.mark.parametrize(
    ("flag", "method", "content", "said"),
    [
        ("profile", "headkv", "{", "is not JSON"),
        ("profile", "headkv", "[1]", "is no head profile"),
        ("profile", "headkv", '{"model": "m"}', "kind|scores|allowed"),
        ("gates", "duo", "a\tb\n", "is no table of layers × kv heads"),
        ("gates", "duo", "0.1\t0.2\n0.3\n", r"rows of \[1, 2\] numbers"),
        ("gates", "duo", "0.1\t1.2\n", "gates hold 1.2; allowed: numbers between 0 and 1"),
        ("gates", "duo", "", "allowed|no table"),
    ],
)
def test_files_of_another_form_are_one_line(flag, method, content, said, tmp_path):
    (tmp_path / "file").write_text(content)
    with pytest.raises(KVProbeError, match=said) as found:
        asked(policies=method, **{flag: tmp_path / "file"})
    one_line(found)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"policies": ("snapkv",)}, EvictionError, "'snapkv' is no policy; allowed"),
        ({"policies": ()}, EvictionError, "no policy or no cache ratio"),
        ({"chunk": 0}, TaskError, "chunk is 0, must be a whole number of at least 1, or None"),
        ({"chunk": True}, TaskError, "chunk is True"),
        ({"new_tokens": 2.5}, TaskError, "new_tokens is 2.5"),
    ],
)
def test_settings_of_the_wrong_kind_are_one_line(change, error, said):
    with pytest.raises(error, match=said) as found:
        Settings(**{"policies": SNAPKV} | change)
    one_line(found)


def test_items_follow_from_the_seed_and_are_ruler_s_without_decoys(smol_tokenizer):
    from types import SimpleNamespace

    model = SimpleNamespace(tokenizer=smol_tokenizer, max_length=None)
    first, again = (Settings(SNAPKV, length=600, seed=2).item(model, 1) for _ in range(2))
    assert first.seed == 20_001 and first.prompt.ids.tolist() == again.prompt.ids.tolist()
    assert (first.settings["decoys"], first.settings["distractors"]) == (0, 0)
    assert Settings(SNAPKV, length=600, options={"distractors": 2}).item(model, 0).settings["distractors"] == 2


@pytest.fixture
def loaded(tiny, monkeypatch):
    """A model on which any forward pass is a failure."""
    from kvprobe import engine

    model = tiny("llama")  # its own checks run when it is loaded

    def refuse(*args, **kwargs):
        raise AssertionError("something was computed")

    monkeypatch.setattr(engine, "forward", refuse)
    monkeypatch.setattr(engine, "prefill", refuse)
    return model


def policy(name, **more):
    return (eviction.policy(name, **more),)


WIDE = [[1.0] * 5] * 3


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"items": 0}, TaskError, "items is 0, must be a whole number of at least 1"),
        (
            {"policies": policy("random"), "caches": ("0.2", "0.01")},
            EvictionError,
            "cache 0.01 of 18 tokens is no entry at all; allowed: at least 0.05556",
        ),
        ({"policies": policy("snapkv")}, EvictionError, "looks at the last 32 queries and the context has 18 tokens"),
        (
            {"policies": policy("snapkv", window=9)},
            EvictionError,
            "cache 0.4: 7 of 18 entries are fewer than the 9 that",
        ),
        (
            {"policies": policy("random") + policy("snapkv+two_stage", window=9)},
            EvictionError,
            r"cache 0.4: 7 of 18 .* 9 that snapkv\+two_stage always keeps; allowed: a cache ratio of at least 0.5",
        ),
        (
            {"policies": policy("streaming", sinks=8)},
            EvictionError,
            "7 of 18 entries are fewer than the 8 that streaming",
        ),
        (
            {"policies": policy("defensivekv", window=9)},
            EvictionError,
            "fewer than the 9 that defensivekv always keeps",
        ),
        ({"policies": policy("headkv", importance=WIDE, window=4)}, EvictionError, "importance .*5.* allowed: .*6"),
        (
            {"policies": policy("duo", gates=WIDE, sinks=2, recent=4)},
            EvictionError,
            r"gates of shape \[3, 5\]; allowed: \[3, 2\]",
        ),
        ({"policies": policy("defensivekv", window=4), "chunk": 9}, EvictionError, "defensivekv compares heads"),
        ({"policies": policy("oracle"), "chunk": 9}, EvictionError, "oracle knows what comes after"),
        (
            {"policies": policy("snapkv", granularity="query_head", **curve_runs.SMALL), "chunk": 12},
            EvictionError,
            "a cache holds kv heads, not query heads",
        ),
        ({"chunk": 3}, EvictionError, "last 4 queries and the context has 3 tokens"),
        ({"chunk": 5}, EvictionError, "cache 0.4, first chunk: 2 of 5 entries are fewer than the 4 that snapkv"),
        ({"new_tokens": 490}, PromptError, "516 tokens do not fit the model's context of 512"),
    ],
)
def test_what_the_items_have_no_room_for_is_refused_before_anything_runs(change, error, said, loaded):
    given = {"policies": SNAPKV, "caches": ("0.9", "0.4")} | change
    with pytest.raises(error, match=said) as found:
        curves.run(loaded, curve_runs.settings(**given))
    one_line(found)


def test_the_shortest_item_decides_and_the_joint_setting_has_more_room(loaded):
    nine = curve_runs.settings(policies=policy("snapkv", window=8), caches=("0.4",), items=1)
    curves.validate(loaded, nine)  # ⌊0.4 · 20⌋ = 8
    with pytest.raises(EvictionError, match="7 of 18"):
        curves.validate(loaded, curve_runs.settings(policies=nine.policies, caches=("0.4",), items=2))
    curves.validate(loaded, curve_runs.settings(policies=nine.policies, caches=("0.4",), setting="joint"))


def test_whatever_the_check_of_sizes_lets_through_can_be_chosen(tiny):
    """Every policy of the law table, at the smallest share that passes the check, on a real context."""
    from policies import all_policies

    model = tiny("llama")
    ids = curve_runs.settings().item(model, 1).prompt.ids[:18]
    for each in all_policies().values():
        for entries in range(1, 19):
            cache = f"{entries}/18"
            asked = curve_runs.settings(policies=(each,), caches=(cache,), items=2)
            try:
                curves.validate(model, asked)
            except KVProbeError:
                with pytest.raises(EvictionError):
                    each.select(model, ids, cache, future=[7, 8, 9])
            else:
                assert each.select(model, ids, cache, future=[7, 8, 9]).any()
                break
        else:
            raise AssertionError(f"{each.name}: no share passes")


def test_sizes_take_no_memory(tiny):
    from kvprobe.eviction import rehearsal

    blank = rehearsal._blank(tiny("llama"), SNAPKV[0], 0, 1 << 20)
    assert sum(part.untyped_storage().nbytes() for part in (blank.layer.keys, blank.layer.values)) <= 8
    assert torch.equal(blank.scores, torch.zeros(2, 1 << 20))

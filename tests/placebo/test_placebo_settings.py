"""Settings of a placebo run: every word arrives, every wrong value is one line."""

import math
from types import SimpleNamespace

import placebo_items
import pytest
import tiny

from kvprobe import placebo
from kvprobe.errors import TaskError
from kvprobe.placebo import Settings
from kvprobe.placebo.settings import from_command

WORDS = {
    "task": None,
    "file": None,
    "needles": None,
    "decoys": None,
    "length": None,
    "items": None,
    "placebos": 4,
    "caliper": 0.25,
    "position_caliper": None,
    "profile_weight": 0.0,
    "remedies": "contiguous,hard,hard_set,token_set",
    "inject": "unmatched",
    "direction": "placebo",
    "level": "layer",
    "kappas": "0.25,0.5,0.75",
    "threshold": 0.5,
    "rule": "first",
    "rho": 0.85,
    "layers": None,
    "residual_norm": False,
    "haystack": None,
    "new_tokens": None,
    "norm": 1,
    "seed": 0,
}


def given(**words):
    return from_command(WORDS | words)


def test_without_words_the_command_has_the_defaults():
    assert given() == Settings() and given().arms == placebo.ARMS and given().remedies == placebo.REMEDIES


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ({"task": "niah_single_1"}, {"task": "niah_single_1"}),
        ({"length": 900, "items": 3, "seed": 7}, {"length": 900, "items": 3, "seed": 7}),
        ({"placebos": 2, "caliper": 0.5}, {"placebos": 2, "caliper": 0.5}),
        ({"position_caliper": 0.1, "profile_weight": 2.0}, {"position_caliper": 0.1, "profile_weight": 2.0}),
        ({"remedies": "hard_set, hard"}, {"remedies": ("hard_set", "hard")}),
        ({"remedies": ""}, {"remedies": placebo.REMEDIES}),
        ({"inject": "never", "direction": "random"}, {"inject": "never", "direction": "random"}),
        ({"level": "head", "rule": "stays"}, {"level": "head", "rule": "stays"}),
        ({"kappas": ""}, {"kappas": ()}),
        ({"kappas": "0.1,0.9"}, {"kappas": (0.1, 0.9)}),
        ({"threshold": 0.0, "rho": 1.0}, {"threshold": 0.0, "rho": 1.0}),
        ({"layers": "12,10,10"}, {"layers": (10, 12)}),
        ({"residual_norm": True, "norm": 2}, {"residual_norm": True, "p": 2}),
        ({"new_tokens": 5}, {"new_tokens": 5}),
        ({"needles": 9, "decoys": 0, "haystack": "texts"}, {"options": {"needles": 9, "decoys": 0, "path": "texts"}}),
        ({"task": "trace_memory"}, {"task": "trace_memory", "length": None}),
        ({"task": "trace_memory", "length": 400}, {"task": "trace_memory", "length": 400}),
        ({"file": "own.jsonl"}, {"task": "user", "path": "own.jsonl", "length": None}),
        ({"file": "own.jsonl", "task": "user"}, {"task": "user", "path": "own.jsonl", "length": None}),
        (
            {"file": "own.jsonl", "task": "trace_memory"},
            {"task": "user_traces", "path": "own.jsonl", "length": None},
        ),
        ({"file": "own.jsonl", "task": "user_traces"}, {"task": "user_traces", "path": "own.jsonl", "length": None}),
    ],
)
def test_words_of_the_command(words, wanted):
    assert given(**words) == Settings(**wanted)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"task": "niah_single_9"}, "no task 'niah_single_9', must be one of niah_single_1"),
        ({"task": "user"}, "a file goes with user or user_traces only"),
        ({"task": "user_traces"}, "a file goes with user or user_traces only"),
        ({"file": "own.jsonl", "task": "niah_single_1"}, "--task niah_single_1: leave the task out"),
        ({"file": "own.jsonl", "length": 900}, "--length 900 with --file own.jsonl: leave it out"),
        ({"file": "own.jsonl", "items": 3}, "--items 3 with --file own.jsonl: leave it out"),
        ({"file": "own.jsonl", "needles": 3}, "needles: options of needle tasks, not of user"),
        ({"file": "own.jsonl", "task": "trace_memory", "haystack": "x"}, "path: options of needle tasks"),
        ({"task": "trace_memory", "needles": 3, "decoys": 1}, "needles, decoys: options of needle tasks"),
        ({"remedies": "hard,injected"}, "remedies holds ['injected'], must be some of contiguous, hard"),
        ({"remedies": ","}, "remedies holds [], must be some of"),
        ({"kappas": "0.5,much"}, "kappas holds 'much', must be numbers with commas"),
        ({"kappas": "1"}, "kappas holds 1, must be shares between 0 and 1"),
        ({"kappas": "0,0.5"}, "kappas holds 0, must be shares between 0 and 1"),
        ({"kappas": "nan"}, "kappas holds nan, must be shares between 0 and 1"),
        ({"layers": "1,two"}, "layers holds 'two', must be whole numbers with commas"),
        ({"layers": ""}, "layers names none, must be at least one, or left out for all"),
        ({"inject": "sometimes"}, "inject is 'sometimes', must be one of unmatched, always, never"),
        ({"direction": "target"}, "must be one of placebo, random"),
        ({"level": "model"}, "must be one of layer, head"),
        ({"rule": "last"}, "must be one of first, stays"),
        ({"norm": 3}, "p is 3, must be one of 1, 2"),
        ({"placebos": 0}, "placebos is 0, must be at least 1"),
        ({"items": 0}, "items is 0, must be at least 1"),
        ({"seed": -1}, "seed is -1, must be at least 0"),
        ({"caliper": 0.0}, "caliper is 0, must be a finite number above 0"),
        ({"caliper": -0.5}, "caliper is -0.5, must be a finite number above 0"),
        ({"caliper": math.nan}, "caliper is nan, must be a finite number above 0"),
        ({"caliper": math.inf}, "caliper is inf, must be a finite number above 0"),
        ({"position_caliper": 0.0}, "position_caliper is 0, must be"),
        ({"profile_weight": -1.0}, "profile_weight is -1, must be a finite number, at least 0"),
        ({"threshold": 1.5}, "threshold is 1.5, must be from 0 to 1 bits"),
        ({"threshold": math.nan}, "threshold is nan, must be from 0 to 1 bits"),
        ({"rho": 0.0}, "rho is 0, must be above 0 and at most 1"),
        ({"rho": 1.01}, "rho is 1.01, must be above 0 and at most 1"),
    ],
)
def test_wrong_words_are_one_line(words, said):
    with pytest.raises(TaskError) as caught:
        given(**words)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"arms": ("placebo", "mask")}, "arms holds 'mask', must be some of gate, placebo"),
        ({"rows": 1}, "rows is 1, must be at least 2"),
        ({"remedies": ()}, "remedies holds [], must be some of"),
        ({"task": "user"}, "task 'user' with path=None"),
        ({"path": "own.jsonl"}, "a file goes with user or user_traces only"),
        ({"layers": ()}, "layers names none"),
    ],
)
def test_wrong_settings_are_one_line(words, said):
    with pytest.raises(TaskError) as caught:
        Settings(**words)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_arms_can_be_left_out():
    settings = Settings()
    assert settings.running(None) is settings
    assert settings.running("gate").arms == ("gate",) and settings.running(["dose", "gate"]).arms == ("dose", "gate")
    with pytest.raises(TaskError, match="arms holds 'gates'"):
        settings.running("gates")


def test_items_are_made_from_seeds_of_their_own(tmp_path):
    model = SimpleNamespace(tokenizer=tiny.tokenizer(), max_length=2048)
    made = Settings("trace_memory", length=None, items=3, seed=2).make(model)
    assert [item.seed for item in made] == [20000, 20001, 20002]
    path = str(placebo_items.written(tmp_path / "own.jsonl", *(placebo_items.item_row(i) for i in range(3))))
    assert [item.answer.strip() for item in Settings("user", path=path, items=1).make(model)] == ["17", "29", "41"]
    traces = str(placebo_items.written(tmp_path / "traces.jsonl", placebo_items.trace_row(0)))
    settings = Settings("user_traces", path=traces)
    assert settings.traces and not Settings("user", path=path).traces and len(settings.make(model)) == 1

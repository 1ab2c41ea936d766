"""Any words after ``kvprobe``: status 0, 1 or 2, one line where it is not 0, and no file outside ``--out``."""

import os

import pytest
import typer
from fuzzing import ANY, lawful
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvprobe import cli, tasks

COMMANDS = typer.main.get_command(cli.app).commands
# Small where nothing else is drawn: what is fuzzed is what is read, not what is computed. The last word counts.
FIRST = {
    "niah": "--items 1 --length 420 --distractors 4",
    "evict": "--items 1 --length 420 --policies snapkv --cache 0.2",
    "placebo": "--items 1 --length 420",
    "map": "--documents 1 --length 300",
    "audit": "--documents 1 --length 300",
    "heads": "--items 1 --lengths 420 --depths 0 --top 3",
    "sinks": "--items 1 --length 420",
}
LIKELY = {
    "task": (*tasks.names(), *tasks.trace_names(), "user", "user_traces"),
    "policies": ("snapkv", "tova+adakv,h2o", "snapkv+two_stage", "headkv", "duo", "snapkv+nothing", "snapkv,snapkv"),
    "cache": ("0.1", "10%", "0.1,0.10", "1", "64", "0.2,0.4"),
    "budgets": ("0.1", "0.1,0.2", "5"),
    "kappas": ("0.1,0.9", "1", "0"),
    "layers": ("0", "0,1", "1,1", "5"),
    "docs": ("essays", "multi_news"),
    "template": ("ruler", "criticalkv", "multi_news", "none", "{context} x"),
    "sweep": ("alpha", "epsilon,norm", "task"),
    "epsilons": ("0,1e-6", "1e-4", "-1"),
    "probe": ("first_decoded", "last_prompt", "next_token"),
    "preset": ("paper", "released", "ruler32k"),
    "length": ("300", "700", "4096", "4097"),
    "queries": ("suffix", "answer", "all"),
}
AWAY = {
    "out",
    "model",
    "items",
    "documents",
    "seeds",
    "draws",
    "needles",
    "join",
}  # drawn below, or a cost by themselves
law = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
COUNTS = st.sampled_from(("0", "1", "2", "-1", "x", "nan", "1.5", "9" * 30, "9223372036854775808", ""))


@st.composite
def lines(draw, name):
    """One command with up to four of its options."""
    words = [name, *FIRST.get(name, "").split()]
    for option in draw(st.lists(st.sampled_from(COMMANDS[name].params), max_size=4)):
        flag = draw(st.sampled_from((*option.opts, *option.secondary_opts)))
        if not flag.startswith("-"):
            words.append(draw(ANY))
        elif getattr(option, "is_flag", False):
            words.append(flag)
        elif option.name not in ("out", "model"):
            words += [flag, draw(values(option))]
    return words


def values(option):
    if option.name in AWAY:
        return COUNTS
    likely = (*LIKELY.get(option.name, ()), *([] if option.default is None else [str(option.default)]))
    return st.one_of(st.sampled_from(likely), ANY) if likely else ANY


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to stand in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_options(name, validated, here):
    @settings(law, max_examples=12 if name == "plan" else 45)  # a plan costs a second
    @given(lines(name))
    def check(words):
        lawful(words)
        assert os.listdir(here) == [], words

    check()

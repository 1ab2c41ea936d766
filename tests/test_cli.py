"""The frame of the command line: exit statuses, and one line for each mistake."""

import pytest
import typer

import kvprobe
from kvprobe import cli, options
from kvprobe.errors import TaskError


@pytest.fixture
def command(monkeypatch):
    """A command ``act`` that does what the test says."""
    app = typer.Typer()
    app.callback()(cli._kvprobe)
    monkeypatch.setattr(cli, "app", app)

    def register(action):
        @app.command("act")
        def act(items: int = 1, out: options.Out = None, as_json: options.Json = False, seed: options.Seed = 0):
            return action(items)

    return register


def raising(error):
    def action(items):
        raise error

    return action


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvprobe {kvprobe.__version__}\n"
    assert cli.main(["--help"]) == 0
    help_text = capsys.readouterr().out
    assert cli.main([]) == 0
    assert capsys.readouterr().out == help_text


def test_a_command_returns_zero_or_what_it_exits_with(command):
    command(lambda items: None)
    assert cli.main(["act"]) == 0
    command(raising(typer.Exit(1)))
    assert cli.main(["act"]) == 1


def test_a_mistake_is_one_line_and_exit_2(command, capsys):
    command(raising(TaskError("unknown task 'niah';\nallowed: niah_single_1")))
    assert cli.main(["act"]) == 2
    said = capsys.readouterr()
    assert said.err == "kvprobe: unknown task 'niah'; allowed: niah_single_1\n" and not said.out


@pytest.mark.parametrize(
    ("words", "quoted"),
    [
        (["--nonsense"], "--nonsense"),
        (["act", "--itmes", "3"], "--itmes"),
        (["act", "--items", "many"], "'many'"),
        (["act", "--seed", "-1"], "-1"),
        (["act", "--items"], "--items"),
        (["react"], "'react'"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(command, capsys, words, quoted):
    command(lambda items: None)
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvprobe: ") and quoted in said and "--help" in said and said.count("\n") == 1


@pytest.mark.parametrize("words", [["--debug", "act"], ["act", "--debug"]])
def test_debug_lets_the_error_through(command, words):
    command(raising(TaskError("unknown task")))
    with pytest.raises(TaskError):
        cli.main(words)


def test_a_bug_is_told_from_a_mistake(command, capsys):
    command(raising(KeyError("mass")))
    assert cli.main(["act"]) == 70
    assert capsys.readouterr().err == "kvprobe: a bug: KeyError: 'mass'; --debug shows the traceback\n"


def test_interrupt(command, capsys):
    command(raising(KeyboardInterrupt()))
    assert cli.main(["act"]) == 130
    assert capsys.readouterr().err == "kvprobe: interrupted\n"


def test_evict_hands_over_every_word(monkeypatch):
    """No option of the command is dropped on the way to the settings, and no default differs from theirs."""
    from kvprobe import commands
    from kvprobe.curves import settings as curves

    seen = []
    monkeypatch.setattr(commands, "evict", lambda *given: (seen.append(given), ({}, None))[1])
    monkeypatch.setattr(commands, "print_evict", lambda summary, out: None)
    assert cli.main(["evict"]) == 0
    plain = curves.Settings(tuple(curves.policy(name) for name in curves.POLICIES), options={"template": "ruler"})
    assert seen[0][:3] == ("smollm2-135m", plain, None)
    words = "--task niah_multikey_1 --policies snapkv+two_stage --cache 0.2 --length 800 --items 3 --setting joint "
    words += "--chunk 100 --preset released --alpha 0.25 --epsilon 0.01 --template criticalkv --haystack texts "
    words += "--new-tokens 9 --model tiny --seed 5 --out run"
    assert cli.main(["evict", *words.split()]) == 0
    name, found, out, arguments = seen[1]
    (policy,) = found.policies
    assert (name, str(out), found.names, found.caches) == ("tiny", "run", ["snapkv+two_stage"], ("0.2",))
    assert (found.task, found.length, found.items, found.seed) == ("niah_multikey_1", 800, 3, 5)
    assert (found.setting, found.chunk, found.new_tokens) == ("joint", 100, 9)
    assert found.options == {"template": "criticalkv", "path": "texts"}
    assert (policy.selector.alpha, policy.selector.epsilon, policy.seed) == (0.25, 0.01, 5)
    assert (policy.scorer.pool, policy.scorer.kernel) == ("avg", 5)
    options = "task policies cache length items setting chunk preset alpha epsilon profile gates template haystack"
    assert set(arguments) == {*options.split(), "new_tokens", "model", "out", "seed", "json"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--policies snapkw", "no policy part 'snapkw'; allowed: scorers"),
        ("--policies snapkv,snapkv", "policy snapkv is given twice"),
        ("--policies streaming+two_stage", "allowed: topk"),
        ("--task niah_single_9", "niah_single_1"),
        ("--cache 0", "cache ratio '0'; allowed"),
        ("--cache 0.2,1.5", "cache ratio '1.5'; allowed"),
        ("--cache most", "cache ratio 'most'; allowed"),
        ("--cache 0.1,0.10", "given twice"),
        ("--cache ,", "no policy or no cache ratio"),
        ("--setting both", "context, joint"),
        ("--alpha 1.5", "alpha=1.5; allowed: a share between 0 and 1"),
        ("--alpha half", "'half'"),
        ("--epsilon -1", "epsilon=-1.0; allowed"),
        ("--preset best", "paper, released"),
        ("--policies random --alpha 0.2", "none of random has the setting alpha"),
        ("--policies headkv", "--profile FILE"),
        ("--policies duo", "--gates FILE"),
        ("--policies headkv --profile nowhere.json", "cannot read nowhere.json"),
        ("--policies duo --gates nowhere.tsv", "cannot read nowhere.tsv"),
        ("--items 0", "--items"),
        ("--chunk 0", "--chunk"),
        ("--new-tokens 0", "--new-tokens"),
        ("--length 0", "--length"),
    ],
)
def test_evict_refuses_words_before_a_model_is_loaded(words, said, capsys, tmp_path, monkeypatch):
    from kvprobe import models

    def load(name):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load", load)
    out = tmp_path / "run"
    assert cli.main(["evict", *words.split(), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("kvprobe: ") and not out.exists()

"""The frame of the command line: exit statuses, and one line for each mistake."""

import pytest
import typer

import kvprobe
from kvprobe import cli
from kvprobe.errors import TaskError


@pytest.fixture
def command(monkeypatch):
    """A command ``act`` that does what the test says."""
    app = typer.Typer()
    app.callback()(cli._kvprobe)
    monkeypatch.setattr(cli, "app", app)

    def register(action):
        @app.command("act")
        def act(items: int = 1, out: cli.Out = None, as_json: cli.Json = False, seed: cli.Seed = 0):
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

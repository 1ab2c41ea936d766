"""The command ``kvprobe``: thin commands over the library.

No command imports torch before it runs, so ``--help`` answers at once. Whatever a user got wrong is one line on stderr
and exit status 2; a traceback appears only with ``--debug``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from kvprobe import __version__
from kvprobe.cli.app import app
from kvprobe.errors import KVProbeError
from kvprobe.options import Json

USAGE = 2  # a mistake in what was given
INTERNAL = 70  # a mistake of ours, EX_SOFTWARE
INTERRUPTED = 130  # what typer makes of Ctrl-C


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvprobe {__version__}")
        raise typer.Exit


@app.callback()
def _kvprobe(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="smollm2-135m, a folder, or a hub name.")] = "smollm2-135m",
    json: Json = False,
) -> None:
    """Report whether every layer of MODEL can be masked exactly; exit 1 with the reason if not."""
    from kvprobe import capability, commands, records, versions

    report = commands.check(model)
    if isinstance(report, Exception):
        if json:
            print(records.to_json(capability.refusal(model, report, versions.versions())))
        else:
            commands.print_refusal(report)
        _complain(str(report))
        raise typer.Exit(1)
    if json:
        print(records.to_json(report.to_dict()))
    else:
        commands.print_report(report)


for _commands in ("needles", "documents", "scans", "sinking", "planning"):
    import_module(f"kvprobe.cli.{_commands}")  # registers its commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status.

    Parameters
    ----------
    arguments
        The words after ``kvprobe``; by default those of this process.

    Returns
    -------
    int
        0 done, 2 a mistake in the input (one line on stderr), 70 a bug of ours, 130 interrupted; or what the command
        itself chose by raising ``typer.Exit``.
    """
    # Idle threads that spin make every matrix product wait as soon as anything else runs on the machine; threads that
    # sleep at once are woken thousands of times a second. A short spin (GNU OpenMP) is as fast as the one, as polite as
    # the other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in given if word != "--debug"]
    try:
        status = typer.main.get_command(app)(args=words or ["--help"], prog_name="kvprobe", standalone_mode=False)
    except Exception as error:
        if "--debug" in given:
            raise
        return _report(error)
    if status == INTERRUPTED:
        _complain("interrupted")
    return status if isinstance(status, int) else 0


def _report(error: Exception) -> int:
    if isinstance(error, KVProbeError):
        _complain(str(error))
        return USAGE
    if isinstance(error, typer.TyperException):
        _complain(_usage(error))
        return USAGE
    _complain(f"a bug: {type(error).__name__}: {error}; --debug shows the traceback")
    return INTERNAL


def _usage(error: typer.TyperException) -> str:
    """Return typer's message with what it leaves out: the value that was given, and where the allowed ones are."""
    invalid = getattr(error.__cause__, "errors", None)  # of pydantic, by which typer reads values
    given = f" (given {invalid()[0]['input']!r})" if invalid else ""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "kvprobe"
    return f"{error.format_message().rstrip('.')}{given}; '{command} --help' shows what is allowed"


def _complain(message: str) -> None:
    print("kvprobe:", " ".join(message.split()), file=sys.stderr)

"""The Typer application, and what all experiments' commands do with what they were given."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer

app = typer.Typer(
    help="Causal probes of the KV cache.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def perform(command: str, package: str, words: Mapping[str, Any]) -> None:
    """Run one experiment: settings from its words, then run, print, and the JSON line if asked for.

    ``command`` names the functions of :mod:`kvprobe.commands`, ``package`` the experiment's own, whose
    ``settings.from_command`` reads the words.
    """
    from kvprobe import commands, records

    given = dict(words)
    settings = import_module(f"kvprobe.{package}.settings").from_command(given)
    summary, _ = getattr(commands, command)(given["model"], settings, given["out"], given)
    getattr(commands, f"print_{command.rstrip('_')}")(summary, given["out"])
    if given["json"]:
        print(records.to_json(summary))

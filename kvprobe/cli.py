"""The command ``kvprobe``: thin commands over the library.

No command imports torch before it runs, so ``--help`` answers at once. Whatever a user got wrong is one line on stderr
and exit status 2; a traceback appears only with ``--debug``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvprobe import __version__
from kvprobe.errors import KVProbeError
from kvprobe.options import (
    Alpha,
    Chat,
    DocLength,
    Docs,
    Documents,
    Epsilon,
    Join,
    Json,
    Model,
    Norm,
    Out,
    Presets,
    Probe,
    Seed,
    Template,
)

USAGE = 2  # a mistake in what was given
INTERNAL = 70  # a mistake of ours, EX_SOFTWARE
INTERRUPTED = 130  # what typer makes of Ctrl-C

app = typer.Typer(
    help="Causal probes of the KV cache.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    from kvprobe import commands, records

    report = commands.check(model)
    if isinstance(report, Exception):
        _complain(str(report))
        if json:
            print(records.to_json({"ok": False, "model": model, "error": str(report)}))
        raise typer.Exit(1)
    if json:
        print(records.to_json(report.to_dict()))
    else:
        commands.print_report(report)


@app.command()
def niah(
    task: Annotated[str, typer.Option(help="One of RULER's needle tasks.")] = "niah_multikey_1",
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of prompt and generation (default 1500).")] = None,
    items: Annotated[int | None, typer.Option(min=1, help="Number of items (default 6).")] = None,
    distractors: Annotated[int | None, typer.Option(min=0, help="Haystack spans to compare with (default 20).")] = None,
    decoys: Annotated[
        int | None, typer.Option(min=0, help="Unrelated facts planted like needles (default 4; 0 is RULER's protocol).")
    ] = None,
    needles: Annotated[int | None, typer.Option(min=1, help="Keys hidden in each item.")] = None,
    template: Annotated[str, typer.Option(help="ruler or criticalkv.")] = "ruler",
    haystack: Annotated[
        Path | None, typer.Option(help="Your own text: a folder of .txt or PaulGrahamEssays.json.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="ruler32k: 32K tokens, 100 items, no decoys, where not given otherwise.")
    ] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens decoded per arm (default: answer + 8).")] = None,
    exclude_layers: Annotated[str, typer.Option(help="Layers left out of averages and gate, e.g. 0,1.")] = "",
    gate_contrast: Annotated[str, typer.Option(help="hard or distractor.")] = "hard",
    gate_score: Annotated[str, typer.Option(help="mass or delta_mass.")] = "mass",
    gate_at: Annotated[str, typer.Option(help="last (prompt token) or answer (tokens).")] = "last",
    norm: Annotated[int, typer.Option(min=1, max=2, help="p of value norms and perturbation.")] = 1,
    model: Model = "smollm2-135m",
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Plant needles, see which heads re-read the evidence, and cut it out of the cache."""
    from kvprobe import commands, records
    from kvprobe.needles.settings import from_command

    given = {name: value for name, value in locals().items() if name not in ("commands", "records", "from_command")}
    settings = from_command(given)
    summary, _ = commands.niah(model, settings, out, given)
    commands.print_niah(summary, out)
    if json:
        print(records.to_json(summary))


@app.command()
def evict(
    task: Annotated[str, typer.Option(help="One of RULER's needle tasks.")] = "niah_single_1",
    policies: Annotated[
        str, typer.Option(help="Scorers, budgets and selectors joined by +, policies separated by commas.")
    ] = "snapkv,snapkv+two_stage,adakv,adakv+two_stage,streaming,random",
    cache: Annotated[str, typer.Option(help="Shares of the cache to keep.")] = "0.1,0.2,0.3,0.4,0.5,0.6",
    length: Annotated[int, typer.Option(min=1, help="Tokens of prompt and generation.")] = 1500,
    items: Annotated[int, typer.Option(min=1, help="Number of items.")] = 10,
    setting: Annotated[
        str, typer.Option(help="context: compressed before the question is known; joint: together with it.")
    ] = "context",
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Evict after every so many tokens (default: after the whole context).")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Pooling: paper (max, 7; default) or released (avg, 5).")] = None,
    alpha: Alpha = None,
    epsilon: Epsilon = None,
    profile: Annotated[Path | None, typer.Option(help="Head importance for headkv, a JSON profile.")] = None,
    gates: Annotated[Path | None, typer.Option(help="Gates for duo, a TSV of layers × kv heads.")] = None,
    template: Annotated[str, typer.Option(help="ruler or criticalkv.")] = "ruler",
    haystack: Annotated[
        Path | None, typer.Option(help="Your own text: a folder of .txt or PaulGrahamEssays.json.")
    ] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens decoded per arm (default: answer + 8).")] = None,
    model: Model = "smollm2-135m",
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Answer a task from caches that eviction policies have compressed: score against budget."""
    from kvprobe import commands, records
    from kvprobe.curves.settings import from_command

    given = {name: value for name, value in locals().items() if name not in ("commands", "records", "from_command")}
    settings = from_command(given)
    summary, _ = commands.evict(model, settings, out, given)
    commands.print_evict(summary, out)
    if json:
        print(records.to_json(summary))


@app.command(name="map")
def map_(
    docs: Docs = None,
    cache: Annotated[str, typer.Option(help="Share of the cache to keep, for the maps of heads and layers.")] = "0.2",
    policy: Annotated[str, typer.Option(help="The policy to compare with.")] = "snapkv",
    against: Annotated[str, typer.Option(help="The policy held against it.")] = "snapkv+two_stage",
    budgets: Annotated[
        str | None, typer.Option(help="Shares for the curve over sizes (default: those of 0.025 … 0.4 that fit).")
    ] = None,
    measure: Annotated[str, typer.Option(help="Of a layer: attn_out, hidden, or local.")] = "attn_out",
    preset: Presets = "paper,released",
    alpha: Alpha = None,
    epsilon: Epsilon = None,
    probe: Probe = "first_decoded",
    documents: Documents = None,
    length: DocLength = None,
    join: Join = 1,
    template: Template = None,
    chat: Chat = False,
    norm: Norm = 1,
    model: Model = "smollm2-135m",
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Map what two eviction policies do to every head, layer and cache size (exact perturbation)."""
    from kvprobe import commands, records
    from kvprobe.maps.settings import from_command

    given = {name: value for name, value in locals().items() if name not in ("commands", "records", "from_command")}
    settings = from_command(given)
    summary, _ = commands.map_(model, settings, out, given)
    commands.print_map(summary, out)
    if json:
        print(records.to_json(summary))


@app.command()
def audit(
    docs: Docs = None,
    cache: Annotated[str, typer.Option(help="Shares of the cache to keep.")] = "0.1,0.2,0.4",
    base: Annotated[str, typer.Option(help="Policies that select by attention; Algorithm 1 is put on each.")] = (
        "snapkv,adakv"
    ),
    level: Annotated[str, typer.Option(help="layer (bounds summed over heads), head, or both.")] = "layer,head",
    sweep: Annotated[str, typer.Option(help="Also sweep any of alpha, epsilon, norm: L, and a task's score.")] = "",
    sweep_cache: Annotated[str, typer.Option(help="Shares of the cache to keep in sweeps.")] = "0.1,0.2",
    task: Annotated[str, typer.Option(help="The needle task of a sweep's scores.")] = "niah_single_1",
    items: Annotated[int, typer.Option(min=0, help="Items of that task; 0: no scores.")] = 10,
    setting: Annotated[str, typer.Option(help="Of those items: context (question unseen) or joint.")] = "context",
    preset: Presets = "paper,released",
    alpha: Alpha = None,
    epsilon: Epsilon = None,
    probe: Probe = "first_decoded",
    documents: Documents = None,
    length: DocLength = None,
    join: Join = 1,
    template: Template = None,
    chat: Chat = False,
    norm: Norm = 1,
    model: Model = "smollm2-135m",
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Audit the bounds of the output perturbation: how tight, and whether their assumption holds."""
    from kvprobe import commands, records
    from kvprobe.audits.settings import from_command

    given = {name: value for name, value in locals().items() if name not in ("commands", "records", "from_command")}
    settings = from_command(given)
    summary, _ = commands.audit(model, settings, out, given)
    commands.print_audit(summary, out)
    if json:
        print(records.to_json(summary))


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
    # Idle threads that spin make every matrix product wait as soon as anything else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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

"""Commands that scan a model's heads: ``heads``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvprobe.cli.app import app, perform
from kvprobe.options import MOST, Json, Model, Norm, Out, Seed


@app.command()
def heads(
    task: Annotated[str, typer.Option(help="The needle task whose value must be copied.")] = "niah_single_2",
    lengths: Annotated[str | None, typer.Option(help="Lengths in tokens (default 300,600,900,1200,1500).")] = None,
    depths: Annotated[
        str | None, typer.Option(help="Depths of the needle in per cent (default 0,25,50,75,100).")
    ] = None,
    needles: Annotated[int | None, typer.Option(min=1, max=MOST, help="Needles a length × depth (default 1).")] = None,
    full: Annotated[bool, typer.Option("--full", help="20 lengths × 10 depths × 3 needles, as Wu et al.")] = False,
    longest: Annotated[int | None, typer.Option(min=100, max=MOST, help="Longest of --full (default 50000).")] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=MOST, help="How often the grid is run, each time with other items.")
    ] = 2,
    span: Annotated[str, typer.Option(help="What is copied: value, or needle (the whole sentence).")] = "value",
    new_tokens: Annotated[int, typer.Option(min=1, max=MOST, help="Most tokens decoded in a trial.")] = 50,
    threshold: Annotated[float, typer.Option(help="A head with this score is a retrieval head.")] = 0.1,
    reasoning_task: Annotated[
        str, typer.Option(help="The task of the reasoning score; none: the trials of the retrieval score.")
    ] = "niah_multikey_1",
    top: Annotated[int, typer.Option(min=1, max=MOST, help="Heads of the causal check.")] = 10,
    draws: Annotated[
        int, typer.Option(min=1, max=MOST, help="Random sets of heads an item, from the same layers.")
    ] = 8,
    items: Annotated[int, typer.Option(min=0, max=MOST, help="Items of the causal check; 0: none.")] = 12,
    length: Annotated[int | None, typer.Option(min=1, max=MOST, help="Their length (default: the longest).")] = None,
    knockouts: Annotated[bool, typer.Option(help="Mask the evidence in every head alone, on one item.")] = True,
    rule_cache: Annotated[float, typer.Option(help="Cache share of the first-layer rule.")] = 0.2,
    haystack: Annotated[
        Path | None, typer.Option(help="Your own text: a folder of .txt or PaulGrahamEssays.json.")
    ] = None,
    norm: Norm = 1,
    model: Model = "smollm2-135m",
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Find the heads that copy the needle, check them by masking it there alone, and save a head profile."""
    perform("heads", "heads", locals())

"""The command ``sinks``: over items of a task, or over documents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvprobe.cli.app import app, perform
from kvprobe.options import MOST, Json, Model, Norm, Out, Seed


@app.command()
def sinks(
    task: Annotated[str | None, typer.Option(help="A needle task (default niah_single_2, unless --docs).")] = None,
    docs: Annotated[
        str | None,
        typer.Option(
            "--docs",
            help="Documents instead: essays (the shipped ones), a folder of .txt, .txt or .jsonl file, multi_news, or "
            "hub:OWNER/NAME:FILE.",
        ),
    ] = None,
    items: Annotated[int | None, typer.Option(min=1, max=MOST, help="Number of items of the task (default 8).")] = None,
    documents: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="With --docs: number of documents (default: all).")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            help="Most tokens of a document, or of an item with what is kept for its generation (128 tokens): an "
            "item's prompt is that much shorter (default 1500).",
        ),
    ] = None,
    distractors: Annotated[
        int | None, typer.Option(min=0, max=MOST, help="Haystack sentences that time courses follow (default 20).")
    ] = None,
    decoys: Annotated[
        int | None, typer.Option(min=0, max=MOST, help="Unrelated facts planted like needles (default 0).")
    ] = None,
    needles: Annotated[int | None, typer.Option(min=1, max=MOST, help="Keys hidden in each item.")] = None,
    haystack: Annotated[
        Path | None, typer.Option(help="Your own text for items: a folder of .txt or PaulGrahamEssays.json.")
    ] = None,
    join: Annotated[
        int, typer.Option(min=1, max=MOST, help="With --docs: consecutive texts that make one document.")
    ] = 1,
    template: Annotated[
        str | None, typer.Option(help="With --docs: multi_news, none, or a text with {context}.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="With --docs: wrap prompts in the tokenizer's chat template.")
    ] = False,
    queries: Annotated[
        str | None,
        typer.Option(help="Rows that means are over: suffix (question, answer; default of a task), answer, or all."),
    ] = None,
    epsilon: Annotated[
        float, typer.Option(help="ε of the value mass (A + ε) m, from 0 to 1e6; the ratio has none.")
    ] = 1e-4,
    epsilons: Annotated[str | None, typer.Option(help="Those swept (default 0,1e-6,1e-5,1e-4,1e-3,1e-2).")] = None,
    threshold: Annotated[float, typer.Option(help="A head with more mass s on the first position is sinky.")] = 0.3,
    secondary: Annotated[bool, typer.Option(help="Look for secondary sinks (one more pass: hidden states).")] = True,
    courses: Annotated[
        bool | None, typer.Option("--courses/--no-courses", help="Mass and value at every generated token (tasks).")
    ] = None,
    after: Annotated[
        bool | None, typer.Option("--after/--no-after", help="The same with the evidence masked (tasks).")
    ] = None,
    exclude_layers: Annotated[str, typer.Option(help="Layers left out of all that is pooled, e.g. 0,1.")] = "",
    norm: Norm = 1,
    model: Model = "smollm2-135m",
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Attention that is parked against attention that reads: mass and value mass of every key."""
    perform("sinks", "sinks", locals())

"""Options that several commands of ``kvprobe`` have, in one wording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MOST = 10_000_000
"""Of anything counted: more is a slip of the hand, and no list has room for 10³⁰."""

Out = Annotated[Path | None, typer.Option("--out", help="Write tables, figures and a manifest to this folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on the last line of stdout.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Every random choice follows from this number.")]
Model = Annotated[str, typer.Option("--model", help="smollm2-135m, a folder, or a hub name.")]

Docs = Annotated[
    str | None,
    typer.Option(
        "--docs",
        help="Folder of .txt, .txt or .jsonl file, multi_news, or hub:OWNER/NAME:FILE (default: the shipped essays).",
    ),
]
Documents = Annotated[int | None, typer.Option(min=1, max=MOST, help="Number of documents (default: all).")]
DocLength = Annotated[
    int | None,
    typer.Option("--length", min=1, max=MOST, help="Most tokens of a prompt; longer texts are cut at their end."),
]
Join = Annotated[int, typer.Option(min=1, max=MOST, help="Consecutive texts that make one document.")]
Template = Annotated[str | None, typer.Option(help="multi_news, none, or a text with {context}.")]
Chat = Annotated[bool, typer.Option("--chat", help="Wrap prompts in the tokenizer's chat template.")]
Probe = Annotated[str, typer.Option(help="first_decoded, last_prompt, or next_token (bare text, no question).")]
Presets = Annotated[str, typer.Option(help="Pooling: paper (max, 7), released (avg, 5), or both.")]
Alpha = Annotated[float | None, typer.Option(help="First-stage share of two_stage (default 0.5).")]
Epsilon = Annotated[float | None, typer.Option(help="Added to scores in stage 2 (default 1e-4).")]
Norm = Annotated[int, typer.Option(min=1, max=2, help="p of perturbation and bounds.")]

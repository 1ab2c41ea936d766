"""What a job would cost: ``plan``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprobe.cli.app import app
from kvprobe.options import MOST, Json


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="smollm2-135m, a folder, or a hub name.")] = "smollm2-135m",
    length: Annotated[int, typer.Option(min=1, max=MOST, help="Tokens of the prompt.")] = 8192,
    queries: Annotated[int, typer.Option(min=0, max=MOST, help="Rows that are observed.")] = 1,
    arms: Annotated[int, typer.Option(min=0, max=MOST, help="Masks (or other arms) over the shared prefix.")] = 16,
    suffix: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Rows that each arm runs (default 40, or the length).")
    ] = None,
    trace: Annotated[bool, typer.Option(help="Arms keep their rows and own keys (keep_trace).")] = True,
    memory: Annotated[str | None, typer.Option(help="What may be held, e.g. 6GiB (default: what is at hand).")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: the config's).")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    chunk: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Tokens of a prefill pass (default: chosen).")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, max=MOST, help="Arms of a pass (default: chosen).")] = None,
    json: Json = False,
) -> None:
    """Say what a prompt of MODEL and its masks hold and compute, and the pass sizes that fit; exit 1 if none do."""
    from kvprobe import commands, records
    from kvprobe.plan import make
    from kvprobe.sizes import written

    found = make(
        model,
        length,
        queries=queries,
        arms=arms,
        suffix=suffix,
        keep_trace=trace,
        memory=memory,
        dtype=dtype,
        device=device,
        chunk=chunk,
        batch=batch,
    )
    commands.print_plan(found)
    if json:
        print(records.to_json(found.to_dict()))
    if not found.fits:
        typer.echo(
            f"kvprobe: no pass sizes fit: peak {written(found.peak_bytes)}, memory {written(found.memory_bytes)}",
            err=True,
        )
        raise typer.Exit(1)

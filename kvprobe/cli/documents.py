"""Commands over documents: ``map`` and ``audit``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprobe.cli.app import app, perform
from kvprobe.options import (
    MOST,
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
    perform("map_", "maps", locals())


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
    items: Annotated[int, typer.Option(min=0, max=MOST, help="Items of that task; 0: no scores.")] = 10,
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
    perform("audit", "audits", locals())

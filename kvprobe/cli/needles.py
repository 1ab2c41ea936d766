"""Commands over items of a task: ``niah``, ``evict`` and ``placebo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvprobe.cli.app import app, perform
from kvprobe.options import MOST, Alpha, Epsilon, Json, Model, Norm, Out, Seed


@app.command()
def niah(
    task: Annotated[str, typer.Option(help="One of RULER's needle tasks.")] = "niah_multikey_1",
    length: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Tokens of prompt and generation (default 1500).")
    ] = None,
    items: Annotated[int | None, typer.Option(min=1, max=MOST, help="Number of items (default 6).")] = None,
    distractors: Annotated[
        int | None, typer.Option(min=0, max=MOST, help="Haystack spans to compare with (default 20).")
    ] = None,
    decoys: Annotated[
        int | None,
        typer.Option(min=0, max=MOST, help="Unrelated facts planted like needles (default 4; 0 is RULER's protocol)."),
    ] = None,
    needles: Annotated[int | None, typer.Option(min=1, max=MOST, help="Keys hidden in each item.")] = None,
    template: Annotated[str, typer.Option(help="ruler or criticalkv.")] = "ruler",
    haystack: Annotated[
        Path | None, typer.Option(help="Your own text: a folder of .txt or PaulGrahamEssays.json.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="ruler32k: 32K tokens, 100 items, no decoys, where not given otherwise.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Tokens decoded per arm (default: answer + 8).")
    ] = None,
    exclude_layers: Annotated[
        str, typer.Option(help="Layers left out of averages and gate: 0,1, or a rule's .json of kvprobe heads.")
    ] = "",
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
    perform("niah", "needles", locals())


@app.command()
def evict(
    task: Annotated[str, typer.Option(help="One of RULER's needle tasks.")] = "niah_single_1",
    policies: Annotated[
        str, typer.Option(help="Scorers, budgets and selectors joined by +, policies separated by commas.")
    ] = "snapkv,snapkv+two_stage,adakv,adakv+two_stage,streaming,random",
    cache: Annotated[str, typer.Option(help="Shares of the cache to keep.")] = "0.1,0.2,0.3,0.4,0.5,0.6",
    length: Annotated[int, typer.Option(min=1, max=MOST, help="Tokens of prompt and generation.")] = 1500,
    items: Annotated[int, typer.Option(min=1, max=MOST, help="Number of items.")] = 10,
    setting: Annotated[
        str, typer.Option(help="context: compressed before the question is known; joint: together with it.")
    ] = "context",
    chunk: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Evict after every so many tokens (default: after the whole context)."),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Pooling: paper (max, 7; default) or released (avg, 5).")] = None,
    alpha: Alpha = None,
    epsilon: Epsilon = None,
    profile: Annotated[
        Path | None, typer.Option(help="A head profile (JSON): importance for headkv, gates for duo.")
    ] = None,
    gates: Annotated[
        Path | None, typer.Option(help="Gates for duo, a TSV of layers × kv heads, rather than the profile's.")
    ] = None,
    template: Annotated[str, typer.Option(help="ruler or criticalkv.")] = "ruler",
    haystack: Annotated[
        Path | None, typer.Option(help="Your own text: a folder of .txt or PaulGrahamEssays.json.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Tokens decoded per arm (default: answer + 8).")
    ] = None,
    model: Model = "smollm2-135m",
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Answer a task from caches that eviction policies have compressed: score against budget."""
    perform("evict", "curves", locals())


@app.command()
def placebo(
    task: Annotated[str | None, typer.Option(help="A needle task, or trace_memory (default niah_multikey_1).")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Your own items, JSONL: text, target, answer, optional hard and protect.")
    ] = None,
    needles: Annotated[int | None, typer.Option(min=1, max=MOST, help="Keys hidden in each item.")] = None,
    decoys: Annotated[int | None, typer.Option(min=0, max=MOST, help="Unrelated facts planted like needles.")] = None,
    length: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Tokens of prompt and generation (default 1500).")
    ] = None,
    items: Annotated[int | None, typer.Option(min=1, max=MOST, help="Number of items (default 12).")] = None,
    placebos: Annotated[int, typer.Option(min=1, max=MOST, help="Placebos of each target.")] = 4,
    caliper: Annotated[float, typer.Option(help="Largest |ln ratio| of a placebo's strength to the target's.")] = 0.25,
    position_caliper: Annotated[
        float | None, typer.Option(help="Largest difference in depth, as a share of the context.")
    ] = None,
    profile_weight: Annotated[float, typer.Option(help="Weight of the distance between profiles of ln θ.")] = 0.0,
    remedies: Annotated[str, typer.Option(help="Pools to try, in order.")] = "contiguous,hard,hard_set,token_set",
    inject: Annotated[str, typer.Option(help="Vectors where no placebo is found: unmatched, always, never.")] = (
        "unmatched"
    ),
    direction: Annotated[str, typer.Option(help="Of injected vectors: placebo or random.")] = "placebo",
    level: Annotated[str, typer.Option(help="Whose norm injected vectors keep: layer or head.")] = "layer",
    kappas: Annotated[str, typer.Option(help="Doses, as shares of the full strength; empty: none.")] = "0.25,0.5,0.75",
    threshold: Annotated[float, typer.Option(help="Bits at or below which a layer has settled.")] = 0.5,
    rule: Annotated[str, typer.Option(help="first or stays.")] = "first",
    rho: Annotated[float, typer.Option(help="A token is deep at layer ⌈ρL⌉ or later.")] = 0.85,
    layers: Annotated[str | None, typer.Option(help="Layers that are masked, e.g. 10,11,12 (default: all).")] = None,
    residual_norm: Annotated[
        bool, typer.Option("--residual-norm", help="Divide each layer's strength by its hidden state's norm.")
    ] = False,
    haystack: Annotated[
        Path | None, typer.Option(help="Your own text: a folder of .txt or PaulGrahamEssays.json.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Tokens decoded per arm (default: answer + 8).")
    ] = None,
    norm: Norm = 1,
    model: Model = "smollm2-135m",
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Cut a span out of the cache, and others that are as strong a blow: does this one matter more?"""
    perform("placebo", "placebo", locals())

"""prefill, observe, intervene: one pass over the context, then only the tokens that matter.

The context is prefilled once by the twin's fastest exact attention. What is observed or intervened on runs after it,
against the shared prefix; many arms (one arm = one counterfactual) go through in batches without copying the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvprobe import engine, inputs
from kvprobe.arms import Call, Parts, parts_of
from kvprobe.attention import Run
from kvprobe.costs import Job, limits_for
from kvprobe.engine import Prefix
from kvprobe.errors import InterventionError, PlanError, PromptError, quote
from kvprobe.interventions.plan import Intervention, Plan, Scene, compile_arms
from kvprobe.outcomes import Outcome
from kvprobe.sizes import UNLIMITED, Limits
from kvprobe.traces import LayerData, Trace

BATCH_TOKENS = 1280
"""New tokens per batch of arms: beyond this the matrix products stop gaining and activations leave the cache."""

LOGITS_BYTES = 256 << 20


def prefill(model: Any, prompt: Any, length: int | None = None, *, plan: Any = None) -> Prefix:
    """Run the first ``length`` tokens of a prompt (all by default, left pads not counted) once.

    Returns a :class:`Prefix` that :func:`observe` and :func:`intervene` accept, so that many calls share one pass.
    ``plan`` is as for :func:`observe`.
    """
    ids = inputs.real_ids(model, prompt)
    length = len(ids) if length is None else length
    if not hasattr(length, "__index__") or not 0 < length <= len(ids):
        raise PromptError(f"cannot prefill {quote(length)} tokens of a prompt of {len(ids)}: allowed is 1 … {len(ids)}")
    limits = _limits(model, Job(length, queries=0), plan)
    return engine.prefill(model.twin, ids[:length], limits=limits)[0]


def observe(model: Any, prompt: Any, queries: Any = -1, *, prefix: Prefix | None = None, plan: Any = None) -> Trace:
    """Attention logits of chosen queries over all keys, on every layer, from one pass.

    Parameters
    ----------
    queries
        One position, a list, or a slice; negative positions count from the end.
    prefix
        A prefilled context of this prompt, used as far as it lies before the first query.
    plan
        What the run keeps to: a :class:`kvprobe.plan.Plan` or :class:`kvprobe.sizes.Limits`; by default limits of its
        own where the memory at hand asks for them.

    Returns
    -------
    Trace
        fp32 logits rows, values and W_O views per layer, worked out layer by layer when looked at.
    """
    ids = inputs.real_ids(model, prompt)
    positions = inputs.positions(queries, len(prompt), prompt.pad)
    real = torch.tensor(positions) - prompt.pad
    parts: list[Parts]
    if prefix is None:
        limits = _limits(model, Job(len(ids), len(positions)), plan)
        whole, run = engine.prefill(model.twin, ids, real, limits=limits)
        parts = [((keys,), (values,)) for keys, values in whole.layers]
    else:
        start = _usable(prefix, ids, int(real.min()))
        run = Run(prefix=prefix.upto(start).layers, start=start, capture=real - start, reach=prefix.reach)
        cache = engine.new_cache()
        engine.forward(model.twin, ids[None, start:], run, cache, keep=1)
        parts = _parts(prefix.upto(start), cache, 0)
    data = [
        LayerData(run.queries[layer][0], keys, values, run.specs[layer]) for layer, (keys, values) in enumerate(parts)
    ]
    return Trace(prompt.ids, positions, data, model.w_o, prompt.pad, dict(prompt.spans), model.meta)


def intervene(
    model: Any,
    prompt: Any,
    arms: Intervention | Sequence[Intervention | Sequence[Intervention]],
    *,
    suffix: int | None = None,
    continuation: Sequence[int] | Tensor | None = None,
    generate: int = 0,
    prefix: Prefix | None = None,
    logits: str = "all",
    keep_trace: bool = True,
    streams: int = 0,
    batch: int | None = None,
    plan: Any = None,
) -> Any:
    """Run one arm, or many arms over one shared prefix.

    Parameters
    ----------
    arms
        One intervention (returns one :class:`Outcome`), or a list (returns a list). An entry may itself be a tuple of
        interventions applied together.
    suffix
        Number of trailing prompt tokens that run under the intervention, and whose logits are returned. May be omitted
        when every arm names its own queries: an arm's logits then begin at the first query that it can change.
    continuation
        Token ids teacher-forced after the prompt.
    generate
        Number of tokens to decode greedily after the prompt, under the intervention. The continuation is not part of
        what is decoded from: forced and free answers come from one call.
    prefix
        A prefilled context; used as far as it may be shared (up to the first affected query).
    logits
        ``"all"`` rows of the run, or ``"continuation"``: the rows that predict the continuation, and the one behind it.
    keep_trace
        Keep references to query rows and own keys, so that attention of the arm can be looked at.
    streams
        Number of last rows (continuation included) whose attention output and hidden state after every layer are kept
        (:class:`kvprobe.streams.Streams`).
    batch
        Arms per batch; by default as many as keep the matrix products efficient.
    plan
        As for :func:`observe`.

    Returns
    -------
    Outcome or list of Outcome
        Each with a verified receipt. Rows count the prompt's tokens as given.
    """
    single, groups = inputs.arms(arms)
    ids, forced = inputs.real_ids(model, prompt), inputs.continuation(model, continuation)
    generate, streams = inputs.count("generate", generate, 0), inputs.count("streams", streams, 0)
    inputs.check_length(model, len(ids) + max(len(forced), generate))
    # The last generated token is never run.
    scene = replace(model.scene(prompt, suffix), follow=max(len(forced), generate - 1))
    compiled = compile_arms(groups, scene)
    if logits not in ("all", "continuation") or (logits == "continuation" and not len(forced)):
        raise InterventionError(f"logits={logits!r}: allowed are 'all', and 'continuation' with a continuation given")
    job = Call(model, prompt, scene, compiled, ids, forced, generate, logits, keep_trace, streams)
    starts = _starts(compiled, scene)
    if streams > len(ids) + len(forced) - max(starts):
        raise InterventionError(
            f"streams={streams}: the run has {len(ids) + len(forced) - max(starts)} rows; allowed: at most that many"
        )
    given = Limits() if batch is None else Limits(batch=inputs.count("batch", batch, 1))
    limits = _limits(model, _arms_job(job, len(groups), min(starts), prefix), plan, given)
    shared = _shared_prefix(model, torch.cat([ids, forced]), max(starts), prefix, limits)
    outcomes: dict[int, Outcome] = {}
    for start in sorted(set(starts)):
        members = [arm for arm, first in enumerate(starts) if first == start]
        size = limits.batch or batch_size(len(ids) + len(forced) - start, model.geometry.vocab, logits)
        for at in range(0, len(members), size):
            outcomes.update(job.run(members[at : at + size], start, shared, limits))
    ordered = [outcomes[arm] for arm in range(len(groups))]
    return ordered[0] if single else ordered


def _starts(plan: Plan, scene: Scene) -> list[int]:
    """Where each arm's run begins: the first affected query, or the first row asked for, and no earlier."""
    asked = scene.n - max(scene.suffix, 1)
    starts = [asked if first is None else min(asked, first) for first in plan.first]
    free = [start for start, first in zip(starts, plan.first, strict=True) if first is not None]
    # An arm that touches nothing joins the others' batch, where it equals them bit for bit in what it shares.
    default = min(starts) if not free else max(free)
    return [default if first is None else start for start, first in zip(starts, plan.first, strict=True)]


def _limits(model: Any, job: Job, plan: Any, given: Limits = UNLIMITED) -> Limits:
    """What this run keeps to: the given plan, or what memory asks for; ``given`` goes before both."""
    if plan is None:
        return limits_for(model, job, given)
    limits = getattr(plan, "limits", plan)
    if not isinstance(limits, Limits):
        raise PlanError(f"plan={quote(plan)} is not a plan: allowed is what kvprobe.plan.make(…) returns, or Limits")
    planned = getattr(plan, "job", job)
    for name, word in (("n", "tokens"), ("queries", "observed rows"), ("arms", "arms"), ("rows", "rows of an arm")):
        if getattr(job, name) > getattr(planned, name):
            raise PlanError(
                f"the plan is for {getattr(planned, name)} {word}, this run has {getattr(job, name)}; allowed: at most "
                "what was planned"
            )
    return replace(limits, batch=given.batch or limits.batch)


def _arms_job(job: Call, arms: int, start: int, prefix: Prefix | None) -> Job:
    """What planning must know of one :func:`intervene` call."""
    rows = len(job.ids) + len(job.forced) - start
    kept = len(job.forced) + 1 if job.logits == "continuation" else 0
    size = batch_size(rows, job.model.geometry.vocab, job.logits)
    whole = rows + start
    return Job(whole, 0, arms, rows, prefix is not None, job.keep_trace, kept, size)


def batch_size(rows: int, vocab: int, logits: str = "all") -> int:
    """Arms per batch that keep the matrix products efficient, where memory does not ask for fewer."""
    by_tokens = BATCH_TOKENS // max(rows, 1)
    by_logits = LOGITS_BYTES // (4 * vocab * (rows if logits == "all" else 1))
    return max(1, min(by_tokens, by_logits))


def _shared_prefix(model: Any, ids: Tensor, length: int, given: Prefix | None, limits: Limits) -> Prefix | None:
    """The first ``length`` tokens, prefilled: alone, or with the whole text where that turns its keys otherwise."""
    if length == 0:
        return None
    if given is None:
        border = engine.rotation_border(model.twin)
        whole = border is not None and len(ids) > border[0]
        return engine.prefill(model.twin, ids if whole else ids[:length], limits=limits)[0].upto(length)
    usable = _usable(given, ids, length)
    shared = given.upto(usable)
    return shared if len(shared) == length else engine.extend(model.twin, shared, ids[len(shared) : length])


def _usable(prefix: Prefix, ids: Tensor, limit: int) -> int:
    """How much of a given prefix serves a run that starts at ``limit``; another prompt's prefix is an error."""
    if not isinstance(prefix, Prefix):
        raise PromptError(f"prefix={quote(prefix)} is not a prefilled context: allowed is what prefill(…) returns")
    shared = min(len(prefix), len(ids))
    if not torch.equal(prefix.ids[:shared].to(ids.device), ids[:shared]):
        raise PromptError("the prefix was prefilled from other tokens than this prompt's")
    if min(shared, limit) == 0:
        raise PromptError("a query at position 0 leaves no prefix to share: call without prefix=")
    return min(shared, limit)


def _parts(prefix: Prefix, cache: Any, row: int) -> list[Parts]:
    return parts_of(Run(prefix=prefix.layers), engine.cached_layers(cache), row)

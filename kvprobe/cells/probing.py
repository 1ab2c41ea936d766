"""One document, its compressed part as every policy saw it, and the one row that is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvprobe import engine, eviction, inputs, runs
from kvprobe.errors import PromptError, quote
from kvprobe.eviction import Measured, Policy
from kvprobe.prompts import Prompt
from kvprobe.tasks.document import Document
from kvprobe.traces import Trace

PROBES = ("first_decoded", "last_prompt", "next_token")
"""Which row is looked at: the query of the first token that the whole cache decodes greedily (default); the last token
of the question; or, without any question, the document's own last token, everything before it being compressed."""


@dataclass(frozen=True)
class Probed:
    """A document ready to be measured.

    Attributes
    ----------
    document
        What was read.
    prompt
        All tokens; the last one's query is the probe row.
    context_stop
        Number of first tokens that are compressed (left pads are no tokens).
    kind
        One of :data:`PROBES`.
    measured
        The prefilled context, and what each policy's scorer saw of it.
    trace
        The probe row over all keys, on every layer, from the whole cache.
    """

    document: Document
    prompt: Prompt
    context_stop: int
    kind: str
    measured: Measured = field(repr=False)
    trace: Trace = field(repr=False)


def probe(model: Any, document: Document, policies: Sequence[Policy], kind: str = "first_decoded") -> Probed:
    """Prefill the context, let the policies look at it, feed what follows and observe the probe row.

    Parameters
    ----------
    model
        A loaded model.
    document
        From :func:`kvprobe.tasks.documents`.
    policies
        Those that kept sets will be asked of.
    kind
        One of :data:`PROBES`.

    Raises
    ------
    PromptError
        An unknown probe, or a document that does not go with it.
    EvictionError
        A policy that cannot do with the context.
    """
    stop, ids = fitting(model, document, kind)
    later = ids[stop:].tolist() if any(policy.scorer.needs_future for policy in policies) else None
    measured = eviction.measure(model, ids[:stop], policies, future=later)
    prefix, prompt = measured.prefix, document.prompt
    if kind == "first_decoded":
        prefix = engine.extend(model.twin, prefix, ids[stop:].to(prefix.ids.device)) if stop < len(ids) else prefix
        assert prefix.next_logits is not None
        prompt = prompt.extended(prefix.next_logits.argmax()[None])
    return Probed(document, prompt, stop, kind, measured, runs.observe(model, prompt, -1, prefix=prefix))


def extent(model: Any, documents: Sequence[Document], kind: str) -> tuple[int, int]:
    """Fewest tokens that are compressed in any document, and fewest known tokens behind them."""
    found = [fitting(model, document, kind) for document in documents]
    return min(stop for stop, _ in found), min(len(ids) - stop for stop, ids in found)


def fitting(model: Any, document: Document, kind: str) -> tuple[int, torch.Tensor]:
    """Number of compressed tokens and all ids of a document, or why it does not go with this probe."""
    if kind not in PROBES:
        raise PromptError(f"probe={quote(kind)}; allowed: {', '.join(PROBES)}")
    if not isinstance(document, Document):
        raise PromptError(f"{quote(document)} is no document; allowed: what kvprobe.tasks.documents(…) returns")
    ids = inputs.real_ids(model, document.prompt)
    n, stop = len(ids), document.context_stop - document.prompt.pad
    if kind == "next_token":
        if stop != n or n < 2:
            raise PromptError(
                f"{document.name} has a question of {n - stop} tokens behind {stop}; probe='next_token' is allowed for "
                "bare texts of two tokens or more: documents(…, template='none')"
            )
        return n - 1, ids
    if kind == "last_prompt" and stop == n:
        raise PromptError(
            f"{document.name} has no question; probe='last_prompt' needs a template with text after the context"
        )
    inputs.check_length(model, n + (kind == "first_decoded"))
    return stop, ids

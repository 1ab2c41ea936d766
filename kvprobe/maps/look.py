"""From a head in a map to the spans that it reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from kvprobe import cells
from kvprobe.cells import Arm
from kvprobe.cells.pairs import Pair
from kvprobe.errors import TheoryError, quote
from kvprobe.eviction import Policy
from kvprobe.traces import Trace

Spans = dict[str, list[tuple[int, int]]]


def look(
    model: Any,
    document: Any,
    base: Policy | str,
    ours: Policy | str,
    layer: int,
    head: int,
    cache: Any = 0.2,
    *,
    probe: str = "first_decoded",
) -> tuple[Trace, Spans]:
    """The probe row of one document, and what each policy keeps of it for one head.

    Parameters
    ----------
    document
        One of :func:`kvprobe.tasks.documents`.
    layer, head
        A query head, as in :func:`kvprobe.maps.per_head`.
    model, base, ours, cache, probe
        As in :func:`kvprobe.maps.per_head`.

    Returns
    -------
    (Trace, dict)
        For :func:`kvprobe.plots.head_spans`: the spans are ``kept by both``, ``only <base>``, ``only <ours>`` and
        ``question`` (what is never evicted).

    Examples
    --------
    >>> trace, spans = look(model, docs[0], "snapkv", "snapkv+two_stage", layer=5, head=2)      # doctest: +SKIP
    >>> kp.plots.head_spans(trace, 5, 2, spans=spans)                                          # doctest: +SKIP
    """
    pair = Pair.of(base, ours)
    arms = [Arm(policy, str(cache)) for policy in pair.policies]
    cells.refuse(model, *cells.extent(model, [document], probe), arms)
    n_layers, n_heads = model.geometry.n_layers, model.geometry.n_heads
    layer, head = (int(each) if hasattr(each, "__index__") else each for each in (layer, head))
    if not (_place(layer, n_layers) and _place(head, n_heads)):
        raise TheoryError(
            f"layer {quote(layer)}, head {quote(head)}; allowed: layers 0 … {n_layers - 1}, heads 0 … {n_heads - 1}"
        )
    probed = cells.probe(model, document, pair.policies, probe)
    first, second = (
        choice.keep[layer][head * choice.keep.shape[1] // n_heads] for choice in cells.choose(probed, arms)
    )
    pad = probed.prompt.pad
    spans = {
        "kept by both": runs_of(first & second, pad),
        f"only {pair.base.name}": runs_of(first & ~second, pad),
        f"only {pair.ours.name}": runs_of(second & ~first, pad),
        "question": [(pad + probed.context_stop, probed.trace.n)],
    }
    return replace(probed.trace, spans={}), {name: found for name, found in spans.items() if found}


def _place(value: object, n: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < n


def runs_of(mask: Tensor, first: int = 0) -> list[tuple[int, int]]:
    """Half-open runs of True in a boolean row whose first entry stands at position ``first``."""
    padded = [False, *mask.tolist(), False]
    edges = [place for place in range(1, len(padded)) if padded[place] != padded[place - 1]]
    return [(first + start - 1, first + stop - 1) for start, stop in zip(edges[::2], edges[1::2], strict=True)]

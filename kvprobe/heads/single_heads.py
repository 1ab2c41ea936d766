"""knockouts(): the evidence masked in one head at a time, beside what the closed forms say of that head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvprobe import runs, theory
from kvprobe.errors import StatisticsError
from kvprobe.heads.evidence import Span, context, evidence, forced, masked, rows
from kvprobe.heads.sharing import shared_below
from kvprobe.outcomes import answer_logprobs
from kvprobe.spans import check_spans
from kvprobe.tasks.items import Item
from kvprobe.theory.checks import check_p

if TYPE_CHECKING:
    import pandas as pd

EFFECTS = ("delta_logprob", "kl")
CLOSED = ("perturbation", "bound", "mass")
ROWS_BYTES = 64 << 20
"""Attention rows in float64 that are looked at together."""


def knockouts(model: Any, item: Item, *, spans: Any = None, p: int = 1, prefix: Any = None) -> pd.DataFrame:
    """Mask spans in one query head at a time, for every head of the model.

    Parameters
    ----------
    item : Item
        What is asked; the mask is seen by its question and its teacher-forced answer.
    spans : list of (start, stop), optional
        The keys that are cut, together; by default the item's evidence.
    p : {1, 2}
        The norm of the closed forms.
    prefix : Prefix, optional
        The prefilled context.

    Returns
    -------
    pandas.DataFrame
        One row a head: ``layer, head``; ``delta_logprob`` (of the gold answer, masked − clean, nats); ``kl``,
        KL(clean ‖ masked) summed over the rows that predict the answer, nats; and of the clean run, as means over the
        rows that the mask touches: ``perturbation`` (exact L of that head's output), ``bound`` (θ), ``mass`` (a_S).
        ``attrs``: ``tokens`` of the prompt, ``clean_logprob`` of the answer, ``spans``.

    Raises
    ------
    TaskError
        No item, or one without evidence or answer.
    PromptError
        Spans that are not in the prompt, or a prefix of another one.
    TheoryError
        p is neither 1 nor 2; or the spans hold all attention of some row.

    Notes
    -----
    Arms whose heads lie in neighbouring layers run together, as many as fill a batch, and the layers below run once for
    all of them. Theorem 3.3 of CriticalKV (arXiv 2502.03805) for θ; L is derived for kvprobe.
    """
    import pandas as pd

    check_p(p)
    cut = evidence(item)
    cut = cut if spans is None else check_spans(spans, len(item.prompt))
    prefix = context(model, item) if prefix is None else prefix
    trace = runs.observe(model, item.prompt.extended(item.answer_ids), rows(item), prefix=prefix)
    closed = closed_forms(trace, cut, p)
    clean, effects = _effects(model, item, cut, prefix)
    layer, head = (grid.ravel() for grid in np.indices((trace.n_layers, trace.n_heads)))
    frame = pd.DataFrame({"layer": layer, "head": head, **effects, **{name: closed[name].ravel() for name in CLOSED}})
    frame.attrs = {"tokens": len(item.prompt), "clean_logprob": clean, "spans": [list(span) for span in cut]}
    return frame


def agreement(frame: pd.DataFrame) -> dict[str, Any]:
    """Spearman's ρ over heads of what one item's knockouts did with what the clean run says of those heads.

    Returns
    -------
    dict
        ``kl_perturbation``, ``delta_perturbation`` (|Δ log-prob|), and the same with ``bound`` and ``mass``: None where
        either is constant. ``n_heads``, ``tokens``; ``worst``: the head whose mask costs the answer most.

    Raises
    ------
    StatisticsError
        Several rows of one head: ρ is one item's.
    """
    if frame.duplicated(["layer", "head"]).any():
        raise StatisticsError("heads stand several times in the table; allowed: the knockouts of one item")
    effects = {"kl": frame["kl"].to_numpy(float), "delta": frame["delta_logprob"].abs().to_numpy(float)}
    found = {
        f"{name}_{form}": spearman(x, frame[form].to_numpy(float)) for name, x in effects.items() for form in CLOSED
    }
    worst = frame.iloc[int(frame["delta_logprob"].to_numpy(float).argmin())].to_dict()
    named: dict[str, Any] = {name: int(worst[name]) for name in ("layer", "head")}
    named |= {name: float(worst[name]) for name in (*EFFECTS, "perturbation")}
    return found | {"n_heads": len(frame), "tokens": frame.attrs.get("tokens"), "worst": named}


def spearman(x: Any, y: Any) -> float | None:
    """Rank correlation, ties at their mean rank; None where one side is constant."""
    from scipy.stats import rankdata

    ranks = [rankdata(each) for each in (x, y)]
    return None if min(np.ptp(each) for each in ranks) == 0 else float(np.corrcoef(*ranks)[0, 1])


@torch.no_grad()
def closed_forms(trace: Any, cut: Sequence[Span], p: int) -> dict[str, np.ndarray]:
    """L, θ and a_S of cutting all spans at once, [L, H] float64, means over the trace's rows."""
    keep = torch.ones(trace.n, dtype=torch.bool)
    for start, stop in cut:
        keep[start:stop] = False
    layers = [_layer_forms(trace, index, keep, p) for index in range(trace.n_layers)]
    return {name: torch.stack([each[place] for each in layers]).numpy() for place, name in enumerate(CLOSED)}


def _layer_forms(trace: Any, index: int, keep: Tensor, p: int) -> Tensor:
    """[3, H]: the three of one layer, a few rows at a time."""
    step = max(1, ROWS_BYTES // (8 * trace.n_heads * trace.n))
    total = torch.zeros(len(CLOSED), trace.n_heads, dtype=torch.float64)
    norms: list[Tensor] = []
    for start in range(0, len(trace.queries), step):
        view = trace.layer(index, rows=slice(start, start + step))
        A, sink = theory.attention(view.logits.double(), None if view.sink is None else view.sink.double()[:, None])
        values, kept = [view.values[h * len(view.values) // len(A)] for h in range(len(A))], keep.to(A.device)
        norms = norms or [theory.value_norms(V, W_O, p).double() for V, W_O in zip(values, view.w_o, strict=True)]
        for h, (row, V, W_O) in enumerate(zip(A, values, view.w_o, strict=True)):
            own = None if sink is None else sink[h]
            L = theory.perturbation(row, V, W_O, kept, p, own)
            theta = theory.bound(row, norms[h], kept, own)
            total[:, h] += torch.stack([L, theta, (row * ~kept).sum(-1)]).sum(-1).cpu()
    return total / len(trace.queries)


def _effects(model: Any, item: Item, cut: Sequence[Span], prefix: Any) -> tuple[float, dict[str, np.ndarray]]:
    """The clean answer's log-probability, and what each head's mask does to it, [L · H] in the order of heads."""
    L, H = model.geometry.n_layers, model.geometry.n_heads
    step = max(1, (runs.BATCH_TOKENS // len(rows(item)) - 1) // H)  # layers whose arms, and the clean one, fill a batch
    found: list[tuple[float, float]] = []
    clean = 0.0
    for first in range(0, L, step):
        heads = [(layer, head) for layer in range(first, min(L, first + step)) for head in range(H)]
        with shared_below(model.twin, L, first):
            outcomes = forced(model, item, [(), *(masked(cut, [one]) for one in heads)], prefix)
        clean = float(answer_logprobs(outcomes[0].logits[:-1], item.answer_ids).sum())
        found += [_effect(item, outcome.logits[:-1], outcomes[0].logits[:-1], clean) for outcome in outcomes[1:]]
    return clean, {name: np.array([each[place] for each in found]) for place, name in enumerate(EFFECTS)}


def _effect(item: Item, logits: Tensor, reference: Tensor, clean: float) -> tuple[float, float]:
    """Δ ln p of the answer and KL; the latter in float64: of most heads it is far below what float32 leaves of it."""
    delta = float(answer_logprobs(logits, item.answer_ids).sum()) - clean
    p, q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return delta, float((p.exp() * (p - q)).sum())

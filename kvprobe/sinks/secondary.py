"""Secondary sinks: later tokens that behave as the first position does. Four conditions, two of them on hidden states.

Sinks behind the first position share its massive activation and its direction (Sun et al., arXiv 2402.17762; sinks
themselves: Xiao et al., arXiv 2309.17453, Gu et al., arXiv 2410.10781). The four-part label is derived for kvprobe:

=============  ==========================================================================================
high           s_j, mean over heads, is in the top quantile of the layer's candidates
persistent     at least a share ``persistence`` of the queries that see j give it ``times`` × the uniform 1 / visible
aligned        cos(x_j, x_first) ≥ ``cosine``, x the layer's *input* (residual stream before the first norm)
outlying       ‖x_j‖ ≥ ``norm`` × the median ‖x‖ of the layer's real positions
=============  ==========================================================================================

Where a norm stands before attention, a value depends on the direction of x alone: an aligned token has the first
position's value, and with it its m. So a low m or ρ follows from ``aligned``; what ρ adds is to be read from
:func:`kvprobe.sinks.recovery`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprobe import engine, inputs
from kvprobe.attention import Run
from kvprobe.errors import PromptError, TheoryError, quote
from kvprobe.prompts import Prompt
from kvprobe.sinks import checks
from kvprobe.sinks.buckets import FIRST
from kvprobe.sinks.scores import Scores
from kvprobe.sinks.streaming import Array, layer_chunks, row_indices
from kvprobe.streams import watched
from kvprobe.theory.norms import row_blocks
from kvprobe.traces import Trace

if TYPE_CHECKING:
    import pandas as pd

Flags = NDArray[np.bool_]
CONDITIONS = ("high", "persistent", "aligned", "outlying")


@dataclass(frozen=True)
class SecondaryOptions:
    """What counts as a secondary sink.

    The defaults stand where SmolLM2-135M leaves a gap. In its layers 3 to 9 the first position has 6 to 12 × the median
    norm, and a quarter of all tokens `` the`` follow it (cosine 0.97, up to 4 to 11 ×; together they take 0.35 to 0.9).
    Elsewhere at most one token a prompt meets both conditions, in layer 2 where this begins: layer 0 has equal
    embeddings of ordinary norm, and from layer 10 on no cosine is above 0.75, though the first position then has up to
    190 ×. Look at :meth:`Secondary.table` on another model.

    Attributes
    ----------
    quantile
        ``high``: s_j at or above this quantile of the layer's candidates.
    times, persistence
        ``persistent``: mean attention over heads of at least times / visible keys, on at least this share of the
        queries that see j.
    cosine
        ``aligned``: with the first position's residual state.
    norm
        ``outlying``: in units of the layer's median residual norm. Sun et al. call a single activation massive above
        100 and 1,000 × the median; secondary sinks need not be that.
    min_seen
        A key that fewer chosen queries see is not judged: its mean would be about its neighbours only.
    first
        Leading positions that are no candidates: they are the bucket ``first4``.
    """

    quantile: float = 0.95
    times: float = 4.0
    persistence: float = 0.5
    cosine: float = 0.9
    norm: float = 2.0
    min_seen: int = 16
    first: int = FIRST

    def __post_init__(self) -> None:
        bounds = {"quantile": (0, 1), "persistence": (0, 1), "cosine": (-1, 1), "times": (0, np.inf)}
        bounds |= {"norm": (0, np.inf), "min_seen": (1, np.inf), "first": (1, np.inf)}
        for field in fields(self):
            value, (low, high) = getattr(self, field.name), bounds[field.name]
            if field.name in ("min_seen", "first"):
                checks.whole(value, field.name, int(low))
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise TheoryError(f"{field.name}={quote(value)}; allowed: a number from {low} to {high}")


@dataclass(frozen=True)
class Secondary:
    """The four measures and conditions of every layer × key; NaN (and False) where a key is not seen, or a pad.

    Attributes
    ----------
    mass
        [L, n] s_j, mean over heads.
    share
        [L, n] share of the queries that see j and give it times / visible or more.
    cosine
        [L, n] with the first real position's residual state.
    norm
        [L, n] residual norm over the layer's median.
    seen
        [L, n] chosen queries that see the key.
    candidates
        [L, n] seen by ``min_seen`` queries, and not among the first positions.
    high, persistent, aligned, outlying
        [L, n] the conditions; ``high`` holds for candidates only.
    """

    options: SecondaryOptions
    mass: Array
    share: Array
    cosine: Array
    norm: Array
    seen: NDArray[np.int64]
    candidates: Flags
    high: Flags
    persistent: Flags
    aligned: Flags
    outlying: Flags
    ids: tuple[int, ...]

    @property
    def label(self) -> Flags:
        """[L, n] candidates that meet all four."""
        return self.meets(*CONDITIONS)

    def meets(self, *conditions: str) -> Flags:
        """[L, n] candidates that meet the named conditions."""
        if unknown := [name for name in conditions if name not in CONDITIONS]:
            raise TheoryError(f"condition {quote(unknown[0])}; allowed: {', '.join(CONDITIONS)}")
        return np.logical_and.reduce([self.candidates, *(getattr(self, name) for name in conditions)])

    def positions(self, layers: Sequence[int] | None = None) -> tuple[int, ...]:
        """Tokens that have the label in at least one of ``layers`` (None: of all)."""
        chosen = self.label if layers is None else self.label[list(layers)]
        return tuple(int(key) for key in np.flatnonzero(chosen.any(0)))

    @property
    def keys(self) -> tuple[int, ...]:
        """Tokens that have the label in some layer: what :func:`kvprobe.sinks.buckets` takes."""
        return self.positions()

    def counts(self) -> dict[str, Any]:
        """How many candidates meet each condition, layer by layer, and how many tokens have the label anywhere."""
        found = {name: self.meets(name).sum(1).tolist() for name in CONDITIONS}
        totals = {"candidates": self.candidates.sum(1).tolist(), **found, "label": self.label.sum(1).tolist()}
        return {"by_layer": totals, "tokens": len(self.keys), "n": int((self.seen > 0).any(0).sum())}

    def table(self, everything: bool = False) -> pd.DataFrame:
        """One row a labelled layer × key (or every candidate): measures, conditions, ``label``, token ``id``."""
        import pandas as pd

        layer, key = np.nonzero(self.candidates if everything else self.label)
        columns = {"layer": layer, "position": key, "id": np.array(self.ids)[key], "seen": self.seen[layer, key]}
        for name in ("mass", "share", "cosine", "norm", *CONDITIONS, "label"):
            columns[name] = getattr(self, name)[layer, key]
        return pd.DataFrame(columns)


def secondary_sinks(
    model: Any, prompt: Any, trace: Trace, scores: Scores, options: SecondaryOptions | None = None
) -> Secondary:
    """Label secondary sinks of a prompt: attention from its trace, hidden states from one more pass.

    Hidden states are reduced to cosine and norm as each layer is reached; L × n × D never exists.

    Parameters
    ----------
    model, prompt
        Of the clean run that the trace observed.
    trace, scores
        The trace and what :func:`kvprobe.sinks.scores` made of it: the queries are the rows of the scores.
    options
        Thresholds; None for the defaults of :class:`SecondaryOptions`.

    Raises
    ------
    PromptError
        The trace is of other tokens than the prompt, or the scores are of another trace.
    """
    options = SecondaryOptions() if options is None else options
    checks.instance(prompt, Prompt, "prompt", "a Prompt")
    checks.instance(trace, Trace, "trace", "a Trace, such as kvprobe.observe returns")
    checks.instance(scores, Scores, "scores", "what sinks.scores returns")
    checks.instance(options, SecondaryOptions, "options", "SecondaryOptions, or None")
    if not torch.equal(trace.ids.cpu(), prompt.ids.cpu()) or trace.pad != prompt.pad:
        raise PromptError(f"the trace has {trace.n} tokens that are not this prompt's {len(prompt)}; allowed: its own")
    if scores.shape != (trace.n_layers, trace.n_heads, trace.n):
        raise PromptError(
            f"scores of {scores.shape} layers × heads × keys; allowed: those of the trace, "
            f"{(trace.n_layers, trace.n_heads, trace.n)}"
        )
    at = row_indices(trace, scores.queries)
    share = np.stack([_persistence(trace, layer, at, options.times) for layer in range(trace.n_layers)])
    attended = scores.pooled("mass", "layer"), share, scores.seen
    return judge(options, attended, residual_geometry(model, prompt), trace.pad, prompt.ids.tolist())


def residual_geometry(model: Any, prompt: Any) -> tuple[Array, Array]:
    """Cosine with the first position and norm (absolute) of every layer's input, each [L, n] float64; NaN at pads."""
    ids, n_layers = inputs.real_ids(model, prompt), model.geometry.n_layers
    cosine, norm = (np.full((n_layers, len(prompt)), np.nan) for _ in range(2))

    def reduce(layer: int, hidden: Tensor) -> None:
        cosine[layer, prompt.pad :], norm[layer, prompt.pad :] = _against_first(hidden[0])

    run = Run()
    with watched(model.twin, n_layers, reduce, run):
        engine.forward(model.twin, ids[None], run, engine.new_cache(), keep=1)
    return cosine, norm


def judge(
    options: SecondaryOptions,
    attended: tuple[Array, Array, NDArray[np.int64]],
    residual: tuple[Array, Array],
    pad: int,
    ids: Sequence[int],
) -> Secondary:
    """Conditions from measures: (mass, share, seen) and (cosine, absolute norm), each [L, n]."""
    (mass, share, seen), (cosine, norm) = attended, residual
    candidates = seen >= options.min_seen
    candidates[:, : pad + options.first] = False
    relative = norm / np.median(norm[:, pad:], axis=1, keepdims=True)
    high = np.zeros_like(candidates)
    for layer, chosen in enumerate(candidates):
        if chosen.any():
            high[layer] = chosen & (mass[layer] >= np.quantile(mass[layer, chosen], options.quantile))
    flags = share >= options.persistence, cosine >= options.cosine, relative >= options.norm
    return Secondary(options, mass, share, cosine, relative, seen, candidates, high, *flags, tuple(ids))


def _persistence(trace: Trace, layer: int, at: Sequence[int], times: float) -> Array:
    """Share of the rows seeing each key that give it, in the mean over heads, times / visible or more; [n]."""
    often, seen = (torch.zeros(trace.n, dtype=torch.float64) for _ in range(2))
    for heads in layer_chunks(trace, layer, at):
        mean, visible = heads.A.mean(0), heads.visible[0]
        keys = slice(heads.first, heads.first + mean.shape[1])
        enough = (mean >= times / visible.sum(1, keepdim=True)) & visible
        often[keys] += enough.sum(0).cpu()
        seen[keys] += visible.sum(0).cpu()
    return torch.where(seen > 0, often / seen, torch.nan).numpy()


def _against_first(hidden: Tensor) -> tuple[Array, Array]:
    """Cosine of each row [n, D] with row 0, and its norm, in float64, a block of rows at a time."""
    first, parts = hidden[0].double(), []
    for block in row_blocks(len(hidden), 8 * hidden.shape[1], hidden.device):
        x = hidden[block].double()
        norm = x.norm(dim=1)
        parts.append(torch.stack([(x @ first) / (norm * first.norm()), norm]))
    cosine, norm = torch.cat(parts, 1).cpu().numpy()
    return cosine, norm

"""Time courses: where every generated token looks, layer by head, and what the attention it spends there carries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprobe import inputs, runs
from kvprobe.engine import Prefix
from kvprobe.errors import PromptError
from kvprobe.prompts import Prompt
from kvprobe.sinks.buckets import FIRST
from kvprobe.sinks.checks import instance
from kvprobe.sinks.streaming import Array, layer_norms
from kvprobe.spans.inputs import check_spans
from kvprobe.theory.checks import check_p
from kvprobe.traces import LayerView, Trace

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("token", "position", "text", "layer", "head", "bucket", "n_tokens", "mass", "value", "ratio")
RESERVED = ("first4", "generated", "other", "learned_sink")
BLOCK_BYTES = 32 << 20
"""Of one [H, rows, n] tensor of float64 attention."""

Spans = Mapping[str, Sequence[tuple[int, int]]]


def courses(
    model: Any, prompt: Any, spans: Spans, tokens: Sequence[int], *, prefix: Prefix | None = None, p: int = 1
) -> pd.DataFrame:
    """Mass, value and their ratio of every bucket at every generated token, layer × head.

    Row t is the query at position n − 1 + t: the one whose logits *predict* token t, so that what it reads is what the
    token was chosen by. Layers are worked through one at a time.

    Parameters
    ----------
    prompt
        What the tokens followed.
    spans
        Bucket → half-open token spans of the prompt, such as ``item.spans``. Buckets are disjoint: a key belongs to
        ``first4`` (always there), else to the first bucket of the mapping that holds it, else to ``other``.
    tokens
        Ids that were generated after the prompt.
    prefix
        A prefilled context of this prompt.
    p
        Norm of m_j = ‖V_j W_O‖_p, 1 or 2.

    Returns
    -------
    DataFrame
        One row a token × layer × head × bucket: ``token`` (0 … T − 1), ``position`` of the query, ``text`` of the token
        that it predicts, ``layer``, ``head``, ``bucket``, ``n_tokens`` (keys that the query sees), ``mass`` Σ A,
        ``value`` Σ A m (no ε), ``ratio`` Σ A m / Σ A (NaN where Σ A = 0). ``generated`` holds the tokens before this
        one, ``other`` the rest of the prompt; ``learned_sink`` (value 0) is there where the model has one. Masses of
        one query sum to 1.

    Raises
    ------
    PromptError
        No tokens; a span outside the prompt; a bucket with a name that is taken.
    TheoryError
        p neither 1 nor 2, or what is no prompt.
    """
    check_p(p)
    instance(prompt, Prompt, "prompt", "a Prompt")
    ids = inputs.continuation(model, tokens)
    if not len(ids):
        raise PromptError("tokens is empty: a time course needs one generated token at least")
    n, pad = len(prompt), prompt.pad
    bucket_of, names = _buckets(spans, n, n + len(ids) - 1, pad)
    whole = prompt.extended(ids[:-1]) if len(ids) > 1 else prompt  # the last token is predicted, never read
    trace = runs.observe(model, whole, list(range(n - 1, n - 1 + len(ids))), prefix=prefix)
    texts = Prompt.from_ids(ids.cpu()).tokens(model)
    return _table(trace, bucket_of, names, texts, p)


def _buckets(spans: Spans, n: int, total: int, pad: int) -> tuple[NDArray[np.int64], list[str]]:
    """Number of each key's bucket [total], and the names that the numbers stand for."""
    if taken := [name for name in spans if name in RESERVED]:
        raise PromptError(f"a bucket is named {taken[0]!r}: allowed is any name but {', '.join(RESERVED)}")
    given = [name for name, found in spans.items() if len(found)]
    names = ["first4", *given, "generated", "other"]
    bucket_of = np.full(total, len(names) - 1)
    bucket_of[n:] = len(names) - 2
    for number, name in reversed([*enumerate(given, 1)]):
        for start, stop in check_spans(spans[name], n):
            bucket_of[start:stop] = number
    bucket_of[pad : min(pad + FIRST, n)] = 0
    return bucket_of, names


def _table(
    trace: Trace, bucket_of: NDArray[np.int64], names: Sequence[str], texts: Sequence[str], p: int
) -> pd.DataFrame:
    import pandas as pd

    member = torch.nn.functional.one_hot(torch.from_numpy(bucket_of), len(names)).double()  # [n, B]
    parts = []
    for layer in range(trace.n_layers):
        blocks = list(_layer(trace, layer, member, p))
        sums = [np.concatenate([block[i] for block in blocks], axis=0) for i in range(3)]  # [T, H, B]
        has_sink = trace.data[layer].spec.sink is not None
        parts.append(_frame(layer, [*names, "learned_sink"] if has_sink else names, *sums))
    table = pd.concat(parts, ignore_index=True)
    table.insert(1, "position", np.asarray(trace.queries)[table["token"]])
    table.insert(2, "text", np.asarray(texts, dtype=object)[table["token"]])
    return table.sort_values(["token", "layer", "head"], kind="stable", ignore_index=True)[list(COLUMNS)]


def _layer(trace: Trace, layer: int, member: Tensor, p: int) -> Iterator[tuple[Array, Array, Array]]:
    """Per block of rows: visible keys, Σ A and Σ A m, each [rows, H, B]."""
    step = max(1, BLOCK_BYTES // (8 * trace.n_heads * trace.n))
    m: Tensor | None = None
    for start in range(0, len(trace.queries), step):
        view = trace.layer(layer, rows=slice(start, start + step))
        m = torch.from_numpy(layer_norms(view, p)) if m is None else m
        yield _sums(view, member, m)


def _sums(view: LayerView, member: Tensor, m: Tensor) -> tuple[Array, Array, Array]:
    attention, sink = view.rows()
    A = attention.double().cpu()
    visible = (view.logits > -torch.inf).double().cpu() @ member
    found = [visible, A @ member, (A * m[:, None]) @ member]
    if sink is not None:  # no key, and its value is 0
        mass = sink.double().cpu()[..., None]
        found = [torch.cat(pair, -1) for pair in zip(found, (torch.zeros_like(mass), mass, 0.0 * mass), strict=True)]
    counted, masses, values = (each.transpose(0, 1).numpy() for each in found)
    return counted, masses, values


def _frame(layer: int, names: Sequence[str], n_tokens: Array, mass: Array, value: Array) -> pd.DataFrame:
    import pandas as pd

    token, head, bucket = (grid.reshape(-1) for grid in np.indices(mass.shape, dtype=np.int32))
    ratio = np.divide(value, mass, out=np.full(mass.shape, np.nan), where=mass > 0)
    return pd.DataFrame(
        {
            "token": token,
            "layer": np.full(len(token), layer, dtype=np.int32),
            "head": head,
            "bucket": np.asarray(names, dtype=object)[bucket],
            "n_tokens": n_tokens.reshape(-1).astype(np.int32),
            "mass": mass.reshape(-1),
            "value": value.reshape(-1),
            "ratio": ratio.reshape(-1),
        }
    )

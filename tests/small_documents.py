"""Documents of a few random tokens, small policies, and what plain transformers says of one attention row."""

import catalogue
import numpy as np
import torch
from oracles import PROJECTIONS

from kvprobe import eviction
from kvprobe.prompts import Prompt
from kvprobe.tasks.document import Document

SMALL = {"window": 1, "kernel": 3}
STOP = 24


def document(seed, *, n=26, stop=STOP, pad=0, name=None):
    """``n`` random tokens, the first ``stop`` of which are compressed; ``context_stop`` counts left pads, too."""
    ids = catalogue.ids(seed, n)
    prompt = Prompt.from_ids([0] * pad + ids, attention_mask=[0] * pad + [1] * n)
    return Document(name or f"doc-{seed}", prompt, stop + pad)


def documents_for(family, count=3, first=0):
    """Of unequal length; where the window is short the question is, too, so that the probe sees some of the context."""
    short = family in ("mistral", "gemma2", "gpt_oss")
    return [
        document(first + i, n=STOP - i + (1 if short else 3 + i), stop=STOP - i, name=f"doc-{first + i}")
        for i in range(count)
    ]


def policies():
    """Equal and ragged budgets, with and without a second stage, and one without attention."""
    names = ("snapkv", "snapkv+two_stage", "adakv", "adakv+two_stage")
    return [*(eviction.policy(name, **SMALL) for name in names), eviction.policy("tova"), eviction.policy("random")]


def real(doc):
    """(ids without pads, compressed length without pads)."""
    return doc.prompt.ids[doc.prompt.pad :].tolist(), doc.context_stop - doc.prompt.pad


def whole(reference, doc, kind="first_decoded"):
    """(ids whose last query is the probe, compressed length), from plain transformers' greedy token."""
    ids, stop = real(doc)
    if kind == "first_decoded":
        return [*ids, int(reference(ids).logits[-1].argmax())], stop
    return ids, len(ids) - 1 if kind == "next_token" else stop


def rows_of(reference, ids):
    """Per layer (A [H, n] of the last query, V [K, n, d], W_O [H, d, D]) in fp64, hooked out of plain transformers."""
    seen, handles = {}, []

    def hook(layer):
        def keep(module, args, output):
            seen[layer] = output[0].clone()

        return keep

    modules = [m for m in reference.hf.modules() if hasattr(m, "layer_idx") and any(hasattr(m, p) for p in PROJECTIONS)]
    for layer, module in enumerate(modules):
        handles.append(
            (module.v_proj if hasattr(module, "v_proj") else module.c_attn).register_forward_hook(hook(layer))
        )
    try:
        attention = reference(ids).attention
    finally:
        for handle in handles:
            handle.remove()
    H, out = reference.n_heads, []
    for layer, module in enumerate(modules):
        values = seen[layer] if hasattr(module, "v_proj") else seen[layer].chunk(3, -1)[-1]
        weight = module.o_proj.weight.T if hasattr(module, "o_proj") else module.c_proj.weight
        w_o = weight.detach().double().unflatten(0, (H, -1))
        V = values.double().unflatten(-1, (-1, w_o.shape[1])).transpose(0, 1)
        out.append((attention[layer, :, -1].double().numpy(), V.numpy(), w_o.numpy()))
    return out


def size(x, p):
    return np.abs(x).sum() if p == 1 else np.sqrt((x * x).sum())


def sink_of(A):
    """What a row lacks to 1; of a row without a learned sink that is rounding."""
    lacks = 1.0 - float(sum(A))
    return lacks if lacks > 5e-7 else 0.0


def head_measures(A, V, W, kept, p):
    """One head by loops: row A [n], values V [n, d], projection W [d, D], kept [n]; A lacks a learned sink to 1."""
    n = len(A)
    lost = [i for i in range(n) if not kept[i]]
    projected = [V[i] @ W for i in range(n)]
    R = sum(A[i] for i in range(n) if kept[i]) + sink_of(A)
    after = sum((A[i] * projected[i] for i in range(n) if kept[i]), np.zeros(W.shape[-1])) / R
    before = sum(A[i] * projected[i] for i in range(n))
    m = [size(x, p) for x in projected]
    return {
        "mass": sum(A[i] for i in lost),
        "retained": R,
        "value_mass": sum(A[i] * m[i] for i in lost),
        "change": after - before,
        "perturbation": size(after - before, p),
        "centred_bound": sum(A[i] * size(after - projected[i], p) for i in lost),
        "bound": sum(abs(A[i] - (A[i] / R if kept[i] else 0.0)) * m[i] for i in range(n)),
        "m": m,
    }


def stage_measures(A, m, kept, first):
    """σ, θ̂ and both relaxed bounds of one head, from the paper's closed forms; NaN where σ ≤ ½."""
    n = len(A)
    sigma = sum(A[i] for i in range(n) if first[i]) + sink_of(A)
    if sigma <= 0.5:
        return {"sigma": sigma, "stage2_bound": np.nan, "relaxed_bound": np.nan, "relaxed_candidates": np.nan}
    c = 2 - 1 / sigma
    C_prime = sum(A[i] * m[i] for i in range(n)) - c * sum(A[i] * m[i] for i in range(n) if first[i])
    second = [i for i in range(n) if kept[i] and not first[i]]
    seen = [i for i in range(n) if A[i] > 0]
    least = [min((m[i] for i in some), default=0.0) for some in (seen, [i for i in seen if not first[i]])]
    mass = sum(A[i] for i in second)
    return {
        "sigma": sigma,
        "stage2_bound": C_prime - c * sum(A[i] * m[i] for i in second),
        "relaxed_bound": C_prime - least[0] * c * mass,
        "relaxed_candidates": C_prime - least[1] * c * mass,
    }


def behind(kept, n):
    """A kept set of the context, [stop] booleans, and everything behind it."""
    return [*map(bool, kept), *([True] * (n - len(kept)))]


def table_of(keep, total, n_heads):
    """[L, H, total, total]: every query behind the context loses what is not kept ([L, J, stop]), by loops."""
    L, J, stop = keep.shape
    table = torch.zeros(L, n_heads, total, total)
    for layer in range(L):
        for head in range(n_heads):
            for key in range(stop):
                if not keep[layer, head * J // n_heads, key]:
                    table[layer, head, stop:, key] = -torch.inf
    return table

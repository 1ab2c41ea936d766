"""Small items whose evidence is masked in single heads, by plain transformers with a 4-D mask and by loops."""

import math

import torch
from oracles import Cutout, bias_table

from kvprobe.prompts import Prompt
from kvprobe.tasks.items import Item


def item(seed=0, *, context=14, evidence=((9, 12),), question=4, answer=3, references=("nothing",), pad=0):
    """Random bytes with the evidence near the question: models with a window of five see it, too."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 259, (context + question + answer,), generator=generator)
    ids[0] = 1
    prompt = Prompt(torch.cat([torch.zeros(pad, dtype=torch.int64), ids[: context + question]]), {}, pad)
    spans = {"evidence": [(start + pad, stop + pad) for start, stop in evidence]}
    gold = tuple(ids[context + question :].tolist())
    return Item("by_hand", seed, len(prompt), prompt, "", gold, tuple(references), context + pad, spans)


def tokens(item, answer=True):
    """Ids without pads, the answer behind them."""
    return [*item.prompt.ids[item.prompt.pad :].tolist(), *(item.answer_ids if answer else ())]


def table(plain, item, heads, total, spans=None):
    """The bias of masking the evidence in these (layer, head) pairs, [L, H, total, total]."""
    n = len(item.prompt) - item.prompt.pad
    spans = item.spans["evidence"] if spans is None else spans
    keys = tuple((start - item.prompt.pad, stop - item.prompt.pad) for start, stop in spans)
    cutouts = [Cutout(keys, (layer,), {layer: (head,)}, "suffix") for layer, head in heads]
    suffix = len(item.prompt) - item.context_stop
    return bias_table(cutouts, total, n=n, suffix=suffix, n_layers=plain.n_layers, n_heads=plain.n_heads)


def logprobs(plain, item, heads=(), spans=None):
    """ln p [k, vocab] in float64 of the rows that predict the answer, with the heads masked."""
    ids = tokens(item)
    logits = plain(ids, table(plain, item, heads, len(ids), spans)).logits.double()
    first = len(item.prompt) - item.prompt.pad - 1
    return logits[first : first + len(item.answer_ids)].log_softmax(-1)


def effect(plain, item, heads, spans=None, clean=None):
    """Δ ln p of the answer and KL(clean ‖ masked) by loops over its tokens; ``clean`` where it is known already."""
    clean, mine = logprobs(plain, item) if clean is None else clean, logprobs(plain, item, heads, spans)
    delta = sum(float(mine[t, token] - clean[t, token]) for t, token in enumerate(item.answer_ids))
    kl = sum(math.exp(p) * (p - q) for p, q in zip(clean.flatten().tolist(), mine.flatten().tolist(), strict=True))
    return delta, kl


def closed(trace, spans, p):
    """L, θ, a_S of every layer and head, means over rows: each row's softmax and sums by loops in float64."""
    cut = {k for start, stop in spans for k in range(start, stop)}
    found = []
    for view in trace.layers():
        found.append([])
        values, w_o = view.values.double(), view.w_o.double()
        for h in range(len(w_o)):
            V, sums = values[h // (len(w_o) // len(values))], [0.0, 0.0, 0.0]
            for row in view.logits[h].double().tolist():
                seen = [(k, math.exp(s)) for k, s in enumerate(row) if s > -math.inf]
                total = sum(e for _, e in seen) + (0.0 if view.sink is None else math.exp(float(view.sink[h])))
                A = {k: e / total for k, e in seen}
                kept = {k: a for k, a in A.items() if k not in cut}
                a_S = sum(a for k, a in A.items() if k in cut)
                R = sum(kept.values()) + (0.0 if view.sink is None else math.exp(float(view.sink[h])) / total)
                z = sum(a * V[k] for k, a in A.items())
                after = sum(a * V[k] for k, a in kept.items()) / R
                m = {k: float(torch.linalg.vector_norm(V[k] @ w_o[h], p)) for k in A}
                theta = sum(A[k] * m[k] for k in A) - (2 - 1 / R) * sum(A[k] * m[k] for k in kept)
                L = float(torch.linalg.vector_norm((after - z) @ w_o[h], p))
                sums = [x + y for x, y in zip(sums, (L, theta, a_S), strict=True)]
            found[-1].append([x / len(view.logits[h]) for x in sums])
    return found

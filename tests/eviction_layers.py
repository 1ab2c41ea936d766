"""Random layers, and fp64 loops over them: the slow truth that every scorer is compared with."""

import math
from dataclasses import replace

import torch
from torch.testing import assert_close

from kvprobe.eviction.layer import Layer
from kvprobe.twopart import LayerSpec

KINDS = {
    "gqa": {},
    "mqa": {"n_kv_heads": 1},
    "mha": {"n_kv_heads": 4},
    "sink": {"sink": True},
    "softcap": {"softcap": 1.5},
    "window": {"window": 9},
    "all": {"sink": True, "softcap": 1.5, "window": 9},
    "one_kv_head_each": {"n_heads": 2, "n_kv_heads": 2},
}
"""Attention of every kind, by name; ragged and query-head layers are made from these."""


def layer(
    *, n=23, n_heads=4, n_kv_heads=2, d=6, width=7, seed=0, queries=None, sink=False, softcap=None, window=None, **rest
):
    """A layer as a prefill of n tokens would hand it over; every query row is there unless ``queries`` says fewer."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator) * 1.3  # noqa: E731
    rows = n if queries is None else queries
    return Layer(
        index=rest.pop("index", 3),
        n_layers=5,
        keys=draw(n_kv_heads, n, d),
        values=draw(n_kv_heads, n, d),
        w_o=draw(n_heads, d, width),
        queries=draw(n_heads, rows, d),
        spec=LayerSpec(0.4, window, softcap, draw(n_heads) if sink else None),
        positions=torch.arange(n).expand(n_kv_heads, -1),
        length=n,
        **rest,
    )


def ragged(full, lost):
    """The same layer after kv head k lost the first entries ``lost[k]``: rows end at the right, pads on the left."""
    width = full.n - min(lost)

    def packed(part, pad):
        rows = [part[head, gone:] for head, gone in enumerate(lost)]
        pads = [part.new_full((width - len(each), *each.shape[1:]), pad) for each in rows]
        return torch.stack([torch.cat(pair) for pair in zip(pads, rows, strict=True)])

    parts = {"keys": packed(full.keys, 0.0), "values": packed(full.values, 0.0)}
    return replace(full, positions=packed(full.positions, -1), **parts)


def kind(name, **changes):
    """A layer of one kind of attention."""
    return layer(**KINDS[name], **changes)


def logit(lay, head, query, entry):
    """Scaled, capped logit of one query vector and one entry; None where the entry is not there."""
    key = lay.keys[head // lay.group, entry].double()
    raw = lay.spec.scale * float(query.double() @ key)
    return raw if lay.spec.softcap is None else lay.spec.softcap * math.tanh(raw / lay.spec.softcap)


def row(lay, head, query, at):
    """One attention row by loops: exp, sum, divide; pads, later tokens and those outside the window get 0."""
    sees = []
    for position in lay.positions[head // lay.group].tolist():
        ahead = at - position
        sees.append(position >= 0 and ahead >= 0 and (lay.spec.window is None or ahead < lay.spec.window))
    logits = [logit(lay, head, query, entry) if seen else None for entry, seen in enumerate(sees)]
    sink = [] if lay.spec.sink is None else [float(lay.spec.sink[head].double())]
    there = [x for x in logits if x is not None] + sink
    if not there:
        return torch.zeros(lay.n, dtype=torch.float64)
    total = math.fsum(math.exp(x - max(there)) for x in there)
    weights = [0.0 if x is None else math.exp(x - max(there)) / total for x in logits]
    return torch.tensor(weights, dtype=torch.float64)


def rows(lay, count):
    """Attention of the last ``count`` queries, [H, count, n]."""
    first = lay.length - count
    chosen = lay.queries[:, -count:]
    return torch.stack(
        [torch.stack([row(lay, h, chosen[h, j], first + j) for j in range(count)]) for h in range(lay.n_heads)]
    )


def permuted(lay, order):
    """The same layer with its query heads in another order (inside groups)."""
    spec = lay.spec if lay.spec.sink is None else replace(lay.spec, sink=lay.spec.sink[order])
    future = None if lay.future is None else lay.future[order]
    return replace(lay, queries=lay.queries[order], w_o=lay.w_o[order], spec=spec, future=future)


def in_dtype(lay, dtype):
    """The same layer in another precision, as a model of that dtype would hold it."""
    future = None if lay.future is None else lay.future.to(dtype)
    parts = {name: getattr(lay, name).to(dtype) for name in ("keys", "values", "w_o", "queries")}
    return replace(lay, future=future, **parts)


class Turns:
    """A rotation by loops, half-split, over all of d: what scorers ask of a model's rotary embedding."""

    def __init__(self, d, base=50.0):
        self.d, self.base = d, base

    def matrix(self, position):
        """[d, d] in fp64."""
        half = self.d // 2
        out = torch.zeros(self.d, self.d, dtype=torch.float64)
        for i in range(half):
            angle = position * self.base ** (-2 * i / self.d)
            out[i, i] = out[i + half, i + half] = math.cos(angle)
            out[i, i + half], out[i + half, i] = -math.sin(angle), math.sin(angle)
        return out

    def unrotate(self, x, positions):
        turned = [self.matrix(p).T @ x[..., j, :].double().unsqueeze(-1) for j, p in enumerate(positions.tolist())]
        return torch.stack([t.squeeze(-1) for t in turned], -2).to(x.dtype)

    def mean_matrix(self, positions):
        return torch.stack([self.matrix(p) for p in positions.tolist()]).mean(0).float()


def there(lay, scores):
    """Scores [H or K, n] on entries that are there (pads may hold anything finite)."""
    alive = lay.alive if scores.shape[0] == lay.n_kv_heads else lay.alive.repeat_interleave(lay.group, 0)
    return scores.double()[alive]


def close(lay, fast, truth, rtol=2e-5):
    assert bool(torch.isfinite(fast).all())
    assert_close(there(lay, fast), there(lay, truth), rtol=rtol, atol=1e-7)

"""A trace of random layers that can be read in chunks of rows, and sink quantities from loops over single numbers."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from fake_trace import fake_trace

TRACES = {
    "causal": {},
    "learned sink": {"sink": True},
    "window": {"window": 6},
    "window, learned sink, pads": {"window": 6, "sink": True, "pad": 4},
    "pads": {"pad": 4},
    "multi-head": {"H": 3, "K": 3},
    "multi-query": {"H": 3, "K": 1},
}
QUERIES = (6, 11, 17, 30, 38, 39)


@dataclass
class RowTrace:
    """Layers as :class:`kvprobe.Trace` hands them out; ``asked`` records how many rows each call wanted."""

    view: tuple
    n: int
    pad: int
    queries: list
    ids: torch.Tensor
    asked: list = field(default_factory=list)

    @property
    def n_layers(self):
        return len(self.view)

    @property
    def n_heads(self):
        return len(self.view[0].w_o)

    def layer(self, index, rows=None):
        view = self.view[index]
        rows = list(range(len(self.queries))) if rows is None else list(rows)
        self.asked.append(len(rows))
        return replace(view, logits=view.logits[:, rows], queries=view.queries[rows])


def row_trace(n=40, queries=QUERIES, **kind):
    made = fake_trace(n, queries=queries, **kind)
    return RowTrace(made.view, n, kind.get("pad", 0), list(queries), torch.arange(n))


def softmax(logits, sink):
    """One row by exponentials of Python floats: weights, and the learned sink's own (0 without one)."""
    extra = [] if sink is None else [sink]
    top = max([*logits, *extra])
    if top == -math.inf:
        return [0.0] * len(logits), 0.0
    weights = [math.exp(x - top) for x in logits]
    rest = sum(math.exp(x - top) for x in extra)
    total = sum(weights) + rest
    return [w / total for w in weights], rest / total


def tables(trace, rows=None):
    """A [L][H, Q, n], learned [L][H, Q], visible [L][Q, n] of the trace's rows, one number at a time."""
    at = range(len(trace.queries)) if rows is None else [trace.queries.index(q) for q in rows]
    A, learned, visible = [], [], []
    for index in range(trace.n_layers):
        view = trace.layer(index)
        logits, sinks = view.logits.double().tolist(), None if view.sink is None else view.sink.double().tolist()
        made = [[softmax(logits[h][q], None if sinks is None else sinks[h]) for q in at] for h in range(len(logits))]
        A.append(np.array([[row for row, _ in head] for head in made]))
        learned.append(np.array([[rest for _, rest in head] for head in made]))
        visible.append(np.array([[x > -math.inf for x in logits[0][q]] for q in at]))
    return A, learned, visible


def norms(view, p):
    """m [H, n] from single products, in float64."""
    V, W = view.values.double().numpy(), view.w_o.double().numpy()
    G = len(W) // len(V)
    found = np.zeros((len(W), V.shape[1]))
    for h in range(len(W)):
        for j in range(V.shape[1]):
            row = [sum(V[h // G, j, a] * W[h, a, b] for a in range(W.shape[1])) for b in range(W.shape[2])]
            found[h, j] = sum(abs(x) for x in row) if p == 1 else math.sqrt(sum(x * x for x in row))
    return found


def slow_scores(trace, p=1, rows=None):
    """mass [L, H, n], norms, seen [L, n], learned [L, H]."""
    A, learned, visible = tables(trace, rows)
    H, n = trace.n_heads, trace.n
    mass = np.full((trace.n_layers, H, n), np.nan)
    seen = np.zeros((trace.n_layers, n), dtype=int)
    for index in range(trace.n_layers):
        for j in range(n):
            who = [q for q in range(len(visible[index])) if visible[index][q, j]]
            seen[index, j] = len(who)
            for h in range(H):
                if who:
                    mass[index, h, j] = sum(A[index][h, q, j] for q in who) / len(who)
    m = np.stack([norms(trace.layer(index), p) for index in range(trace.n_layers)])
    return mass, m, seen, np.stack([rest.mean(1) for rest in learned])

"""A trace of random layers, and span measures worked out one head, query and span at a time."""

from dataclasses import dataclass, replace

import torch

from kvprobe import theory
from kvprobe.traces import LayerView


@dataclass(frozen=True)
class FakeTrace:
    n: int
    view: tuple[LayerView, ...]

    def layers(self):
        yield from self.view

    def map(self, **changes):
        """The trace with fields of its layers replaced by functions of them."""
        return FakeTrace(
            self.n, tuple(replace(v, **{k: f(getattr(v, k)) for k, f in changes.items()}) for v in self.view)
        )


def fake_trace(
    n=40, *, L=2, H=6, K=2, d=5, D=9, queries=(17, 39), sink=False, window=None, pad=0, dtype=torch.float64, seed=0
):
    """Causal layers; odd ones see only ``window`` keys (self included); the first ``pad`` keys are invisible."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    position, query = torch.arange(n), torch.tensor(queries)[:, None]
    layers = []
    for index in range(L):
        visible = (position <= query) & (position >= pad)
        if window and index % 2:
            visible &= position > query - window
        logits = (3 * normal(H, len(queries), n)).masked_fill(~visible, -torch.inf)
        sinks = 2 + normal(H) if sink else None
        layers.append(LayerView(index, logits, normal(K, n, d), normal(H, d, D), sinks, query[:, 0]))
    return FakeTrace(n, tuple(layers))


def slow_stats(trace, spans, p=1):
    """Rows in the order of ``span_stats``, each from the formulas on one head, query and span, in float64."""
    for v in trace.view:
        for h, logits in enumerate(v.logits.double()):
            V, W_O = v.values[h // (len(v.w_o) // len(v.values))].double(), v.w_o[h].double()
            for q, row in enumerate(logits):
                for start, stop in spans:
                    position = torch.arange(trace.n)
                    keep = (position < start) | (position >= stop)
                    sink = None if v.sink is None else v.sink[h].double()
                    yield {
                        "layer": v.index,
                        "head": h,
                        "query": int(v.queries[q]),
                        "start": start,
                        "stop": stop,
                        **_slow_measures(row, keep, V, W_O, sink, p),
                    }


def _slow_measures(row, keep, V, W_O, sink, p):
    A, s = theory.attention(row, sink)
    m = theory.value_norms(V, W_O, p)
    visible, R = bool((row[~keep] > -torch.inf).any()), theory.retained(A, keep, s)
    L = theta = theta_c = torch.tensor(torch.nan if visible else 0.0)
    if R > 0:
        theta, L = theory.bound(A, m, keep, s), theory.perturbation(A, V, W_O, keep, p, s)
        theta_c = theory.centred_bound(A, V, W_O, keep, p, s)
    return {
        "mass": float(theory.retained(A, ~keep)),
        "value_mass": float(theory.value_mass(A, m, keep)),
        "bound": float(theta),
        "centred_bound": float(theta_c),
        "perturbation": float(L),
        "visible": visible,
        "retained": float(R),
    }

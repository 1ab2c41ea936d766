"""Random attention heads for the laws, and a slow oracle that uses nothing but Python floats."""

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvprobe import theory


@dataclass(frozen=True)
class Head:
    """One head or a batch: logits [..., n], V [..., n, d], W_O [..., d, D], keep [..., n], sink [...] or None."""

    logits: Tensor
    V: Tensor
    W_O: Tensor
    keep: Tensor
    sink: Tensor | None

    @property
    def A(self) -> Tensor:
        return theory.attention(self.logits, self.sink)[0]

    @property
    def sink_mass(self) -> Tensor | None:
        return theory.attention(self.logits, self.sink)[1]


def random_heads(seed, *batch, n=12, d=4, D=8, sink=False, dtype=torch.float64):
    """Flat to spiky rows; in every other row key 0 holds 0.9998 of what the keys hold. Values with and without a shared
    offset, of widely differing norms. At least one key is kept and one evicted."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn((*batch, *shape), generator=g, dtype=torch.float64)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand((*batch, *shape), generator=g, dtype=torch.float64)

    logits = normal(n) * uniform(-2, 3, 1).exp()
    beside_key_0 = logits[..., 1:].logsumexp(-1) + math.log(0.9998 / 0.0002)
    logits[..., 0] = torch.where(uniform(0, 1) < 0.5, beside_key_0, logits[..., 0])
    V = normal(n, d) * normal(n, 1).exp() + normal(1, d) * uniform(0, 10, 1, 1)
    keep = uniform(0, 1, n) < uniform(0.1, 0.9, 1)
    one, other = torch.rand((*batch, n), generator=g).argsort(-1)[..., :2, None].unbind(-2)
    keep = keep.scatter(-1, one, True).scatter(-1, other, False)
    sink_logit = logits.logsumexp(-1) + uniform(-4, 9) if sink else None
    tensors = (logits, V, normal(d, D), keep, sink_logit)
    return Head(*(t if t is None or t.dtype == torch.bool else t.to(dtype) for t in tensors))


@st.composite
def heads(draw):
    """One float64 head of a drawn size, with or without a learned sink."""
    return random_heads(
        draw(st.integers(0, 2**31)),
        n=draw(st.integers(2, 14)),
        d=draw(st.integers(1, 5)),
        D=draw(st.integers(1, 7)),
        sink=draw(st.booleans()),
    )


def slow_row(head, dead=()):
    """Attention row by loops: exp, sum, divide. ``dead`` keys have the logit −∞."""
    logits = head.logits.tolist()
    sink = [] if head.sink is None else [float(head.sink)]
    alive = [x for i, x in enumerate(logits) if i not in dead] + sink
    total = math.fsum(math.exp(x - max(alive)) for x in alive)
    return [0.0 if i in dead else math.exp(x - max(alive)) / total for i, x in enumerate(logits)]


def slow_output(row, head):
    """o = Σ_i A_i V_i W_O by loops."""
    V, W = head.V.tolist(), head.W_O.tolist()
    return [
        math.fsum(a * v[k] * W[k][e] for a, v in zip(row, V, strict=True) for k in range(len(W)))
        for e in range(len(W[0]))
    ]


def slow_norm(x, p):
    return math.fsum(abs(v) for v in x) if p == 1 else math.sqrt(math.fsum(v * v for v in x))


def evicted(head):
    return {i for i, kept in enumerate(head.keep.tolist()) if not kept}

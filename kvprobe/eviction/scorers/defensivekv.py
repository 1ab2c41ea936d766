"""DefensiveKV: the worst case over the window instead of its mean, and never nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.errors import EvictionError
from kvprobe.eviction.layer import Layer
from kvprobe.eviction.scorers import settings
from kvprobe.eviction.scorers.base import Scorer, last
from kvprobe.eviction.scorers.windows import Pooling, check_window, pooled
from kvprobe_kernels import projected_norm


@dataclass(frozen=True)
class DefensiveKV(Scorer):
    """max(risk, its mean over positions) × share of the projected value norm (Feng et al., arXiv 2510.13334).

    risk: each attention row of the window (its own columns dropped) pooled and rescaled to the sum it had, then the
    *maximum* over the group's query heads and over the window's rows. The norm m = ‖v W_O‖_p, averaged over the group,
    is divided by its sum over the kv heads at each position. The window always stays, and with it an adaptive first
    stage (see :meth:`protected`).

    Attributes
    ----------
    window, pool, kernel
        Query rows looked at, and how each is pooled.
    stage1
        Attention mass that the window and the first stage may hold together; at 1 rounding would decide.
    mass
        ``"fixed"``: masses of like units; ``"released"``: the released code's reading, which compares the first stage's
        share *without* the window to ``stage1`` minus a mass measured on the ``window`` columns *before* the window,
        averaged over all heads.
    p
        Norm of the projected values.
    """

    name: ClassVar[str] = "defensivekv"
    default_budget: ClassVar[str] = "layer_global"
    aligned: ClassVar[bool] = True
    kv_heads_only: ClassVar[bool] = True
    protects_once: ClassVar[bool] = True

    window: int = 32
    pool: Pooling = "avg"
    kernel: int = 5
    stage1: float = 0.9
    mass: Literal["fixed", "released"] = "fixed"
    p: int = 1

    def __post_init__(self) -> None:
        check_window(self)
        settings.number("stage1", self.stage1, 0.0, 0.999)
        settings.choice("mass", self.mass, ("fixed", "released"))
        settings.choice("p", self.p, (1, 2))

    @property
    def value_aware(self) -> bool:
        """See :class:`Scorer`."""
        return True

    def rows(self, n: int) -> int:
        """See :class:`Scorer`."""
        return self.window

    def score(self, layer: Layer) -> Float[Tensor, "K n"]:
        """See :class:`Scorer`."""
        _check_granularity(layer)
        past = layer.n - self.window
        risk = torch.zeros(layer.n_kv_heads, past, device=layer.keys.device)
        for _, weights in layer.attention(self.window):
            rows = self._pooled(weights[..., :past])
            risk = torch.maximum(risk, rows.unflatten(0, (layer.n_kv_heads, layer.group)).amax((1, 2)))
        risk = torch.maximum(risk, risk.mean(-1, keepdim=True))
        scores = risk * _norm_shares(layer, past, self.p)
        return torch.cat([scores, scores.new_zeros(layer.n_kv_heads, self.window)], -1)

    def protected(self, layer: Layer, budgets: Int[Tensor, " J"]) -> Bool[Tensor, "K n"]:
        """The window, and the entries of most mean attention while they and the window hold less than ``stage1``.

        Σ_first < (stage1 − w) / (1 − w), the sum renormalised without the window and w the window's mass, is the same
        as Σ_first + w < stage1 before renormalising; beside a learned sink, as shares of what the entries get. At most
        b − window entries a set; the mean attention is not pooled, ties go to the earlier position.
        """
        _check_granularity(layer)
        past = layer.n - self.window
        attention = layer.per_set(layer.mean_attention(self.window)).double()
        best, order = attention[:, :past].sort(dim=-1, descending=True, stable=True)
        most = (budgets.to(attention.device) - self.window).clamp(min=0)
        ranks = torch.arange(past, device=attention.device)
        chosen = (best.cumsum(-1) < self._limit(attention, past)[:, None]) & (ranks < most[:, None])
        window = last(layer, self.window)
        window[:, :past] = torch.zeros_like(chosen).scatter_(1, order, chosen)
        return window

    def _limit(self, attention: Tensor, past: int) -> Float[Tensor, " K"]:
        """Attention mass that the first stage stays below, for each head."""
        if self.mass == "fixed":
            return self.stage1 * attention.sum(-1) - attention[:, past:].sum(-1)
        before = attention[:, max(past - self.window, 0) : past].sum(-1).mean()
        return (self.stage1 - before) * attention[:, :past].sum(-1)

    def _pooled(self, rows: Tensor) -> Tensor:
        """Rows [H, t, n] pooled over positions, each with the sum that it had."""
        smooth = pooled(rows.flatten(0, 1), self.pool, self.kernel).view_as(rows)
        tiny = torch.finfo(rows.dtype).tiny
        return smooth * (rows.sum(-1, keepdim=True) / smooth.sum(-1, keepdim=True).clamp(min=tiny))


def _norm_shares(layer: Layer, past: int, p: int) -> Float[Tensor, "K past"]:
    norms = projected_norm(layer.values[:, :past], layer.w_o, p, "mean")
    return norms / norms.sum(0, keepdim=True).clamp(min=torch.finfo(norms.dtype).tiny)


def _check_granularity(layer: Layer) -> None:
    if layer.granularity == "query_head" and layer.group > 1:
        raise EvictionError(
            "defensivekv takes the maximum over the query heads that share a kv head, which one query head has not; "
            "allowed: granularity='kv_head'"
        )

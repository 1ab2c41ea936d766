"""KVMask: the exact counterfactual "this token was not in the cache"."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from kvprobe.errors import InterventionError, quote
from kvprobe.interventions.plan import ArmBias, Cut, Rows, Scene, compile_arms

Keys = Sequence[Any]
POLICIES = ("raise", "zero", "keep_self")
RULES = ("suffix", "after", "generated")
MAX_BETA = 1e4
"""Far beyond any fp32 softmax: e^(−1e4) is 0. Larger finite values would overflow."""


@dataclass(frozen=True)
class KVMask:
    """Add −∞ (or a finite −β) to the attention logits of chosen keys.

    With β = ∞ a chosen query attends as if the keys had never been cached: ``A' = N ⊙ A / R`` with N = 0 on the keys
    and R the retained mass (CriticalKV, arXiv 2502.03805, Theorem 3.2). K and V need no separate treatment. With finite
    β, N = e^{−β} on the keys.

    Parameters
    ----------
    keys
        Token spans ``(start, stop)``, half-open, or names of the prompt's spans; one span may be given bare. ``[]`` is
        the identity: an arm that masks nothing.
    layers
        None for all, one index, or several.
    heads
        None for all, one query-head index, several, or ``{layer: heads}`` for different heads per layer.
    queries
        ``"suffix"``: the last ``suffix`` prompt tokens and whatever follows them (eviction after prefill);
        ``"after"``: every position after the span (it never existed for what follows);
        ``"generated"``: tokens after the prompt only; or explicit absolute positions.
    beta
        Strength in nats; ``inf`` removes.
    on_empty
        A row whose visible keys are all removed has no attention: ``"raise"`` (default), ``"zero"`` (head output
        exactly 0) or ``"keep_self"`` (a query's own key is never masked).
    name
        Label for tables.

    Raises
    ------
    InterventionError
        When compiled for a prompt that it does not fit.
    """

    keys: Keys
    layers: int | Sequence[int] | None = None
    heads: int | Sequence[int] | Mapping[int, Sequence[int]] | None = None
    queries: str | int | Sequence[int] = "suffix"
    beta: float = math.inf
    on_empty: str = "raise"
    name: str | None = None

    def check(self, scene: Scene) -> None:
        """Refuse what cannot be applied to this prompt and model, in one line."""
        if self.on_empty not in POLICIES:
            raise InterventionError(f"on_empty={self.on_empty!r} is not one of {', '.join(POLICIES)}")
        beta: Any = self.beta
        if not (isinstance(beta, Real) and float(beta) > 0):
            raise InterventionError(f"beta={self.beta!r} must be positive (nats; inf removes the keys)")
        if math.isfinite(float(beta)) and float(beta) > MAX_BETA:
            raise InterventionError(
                f"beta={self.beta!r} is not allowed: give at most {MAX_BETA:g} nats, or inf to remove"
            )
        layers = self._layers(scene)
        named = [*self.heads] if isinstance(self.heads, Mapping) else []
        if named and not set(named) & set(layers):
            raise InterventionError(
                f"heads names layers {quote(named)}, none of layers={quote(self.layers)}; allowed are layers in both"
            )
        if not layers or (self.heads is not None and not any(self._heads(layer) for layer in layers)):
            raise InterventionError(
                f"layers={quote(self.layers)}, heads={quote(self.heads)} name no head: allowed is at least one "
                "(the arm that masks nothing is keys=[])"
            )
        for layer in sorted({*layers, *_indices("heads' layers", named)}):
            if not 0 <= layer < scene.n_layers:
                raise InterventionError(f"layer {layer} does not exist: the model has layers 0 … {scene.n_layers - 1}")
            for head in self._heads(layer) or ():
                if not 0 <= head < scene.n_heads:
                    raise InterventionError(f"head {head} does not exist: the model has heads 0 … {scene.n_heads - 1}")
        spans = self._spans(scene)
        self._rows(scene, 0)
        if spans and isinstance(self.queries, str) and self.queries == "suffix" and not scene.suffix:
            raise InterventionError(
                "queries='suffix' needs suffix=…, the number of trailing prompt tokens that run under the mask"
            )

    def cuts(self, layer: int, scene: Scene) -> list[Cut]:
        """The cuts of one layer, empty where this mask does not apply."""
        heads = self._heads(layer)
        if layer not in self._layers(scene) or heads == ():
            return []
        keep_self = self.on_empty == "keep_self"
        return [
            Cut(start, stop, self._rows(scene, stop), -float(self.beta), heads, keep_self, self.on_empty)
            for start, stop in self._spans(scene)
        ]

    def fwd_hooks(
        self, model: Any, prompt: Any, suffix: int | None = None
    ) -> list[tuple[str, Callable[[Tensor, Any], Tensor]]]:
        """The same intervention for TransformerLens: ``model.bridge.run_with_hooks(ids, fwd_hooks=…)``.

        The hooks expect one uncached run over the whole prompt without left pads (``prompt.ids[prompt.pad:][None]``);
        any other shape of scores is an error. Scores are edited in place, in their own dtype and device.
        """
        if not hasattr(prompt, "ids"):
            raise InterventionError(f"{quote(prompt)} is not a prompt: allowed is a Prompt")
        scene = model.scene(prompt, suffix)
        plan = compile_arms([[self]], scene)
        rows = [(layer, head, query - scene.offset) for layer, head, query in plan.silenced[0]]
        silenced = {layer: [(h, q) for at, h, q in rows if at == layer] for layer, _, _ in rows}
        hooks: list[tuple[str, Callable[[Tensor, Any], Tensor]]] = []
        for layer, by_arm in sorted(plan.layers.items()):
            hooks.append((f"blocks.{layer}.attn.hook_attn_scores", score_hook(by_arm[0], scene)))
            if silenced.get(layer):
                hooks.append((f"blocks.{layer}.attn.hook_pattern", _zero_hook(silenced[layer])))
        return hooks

    def _layers(self, scene: Scene) -> Sequence[int]:
        if self.layers is not None:
            return _indices("layers", self.layers)
        return _indices("heads' layers", [*self.heads]) if isinstance(self.heads, Mapping) else range(scene.n_layers)

    def _heads(self, layer: int) -> tuple[int, ...] | None:
        if self.heads is None:
            return None
        return _indices("heads", self.heads.get(layer, ()) if isinstance(self.heads, Mapping) else self.heads)

    def _spans(self, scene: Scene) -> list[tuple[int, int]]:
        """Real, merged, sorted spans: overlapping keys are masked once."""
        named = dict(scene.spans)
        if not isinstance(self.keys, Iterable):
            raise InterventionError(f"keys must hold (start, stop) pairs or span names, not {quote(self.keys)}")
        given = [self.keys] if isinstance(self.keys, str) or _bare(self.keys) else list(self.keys)
        spans: list[tuple[int, int]] = []
        for item in given:
            if isinstance(item, str):
                if item not in named:
                    raise InterventionError(f"the prompt has no span {quote(item)}; it has {sorted(named) or 'none'}")
                item = named[item]
            if not (isinstance(item, Sequence) and len(item) == 2 and all(_integer(value) for value in item)):
                raise InterventionError(f"keys must hold (start, stop) pairs or span names, not {quote(item)}")
            spans.append(scene.real(int(item[0]), int(item[1])))
        return _merge(spans)

    def _rows(self, scene: Scene, span_stop: int) -> Rows:
        if isinstance(self.queries, str):
            if self.queries not in RULES:
                raise InterventionError(
                    f"queries={quote(self.queries)} is not one of {', '.join(RULES)} or a list of positions"
                )
            first = {"suffix": scene.n - scene.suffix, "after": span_stop, "generated": scene.n}[self.queries]
            return Rows(first)
        positions = sorted({*_indices("queries", self.queries)})
        total = scene.n + scene.offset
        bad = [q for q in positions if q < scene.offset]
        if bad or not positions:
            raise InterventionError(
                f"query positions {bad or positions} are not allowed: give {scene.offset} … {total - 1} or later"
            )
        real = tuple(q - scene.offset for q in positions)
        return Rows(real[0], real)


def _indices(name: str, given: Any) -> tuple[int, ...]:
    """One whole number or several, of whatever integer type (tables hand out NumPy's)."""
    try:
        return (operator.index(given),)
    except TypeError:
        pass
    try:
        return tuple(operator.index(value) for value in given)
    except TypeError:
        raise InterventionError(f"{name}={quote(given)} is not allowed: give a whole number or several") from None


def _integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _bare(keys: Keys) -> bool:
    return isinstance(keys, Sequence) and len(keys) == 2 and all(_integer(value) for value in keys)


def _merge(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def score_hook(bias: ArmBias, scene: Scene) -> Callable[[Tensor, Any], Tensor]:
    """A TransformerLens hook that adds the bias to one whole uncached run's scores, in place."""

    def edit(scores: Tensor, hook: Any) -> Tensor:
        if scores.shape[-1] != scene.n or scores.shape[-2] != scene.n:
            raise InterventionError(
                f"{hook.name}: scores of shape {tuple(scores.shape)}, but these hooks are for one uncached run over "
                f"{scene.n} tokens"
            )
        positions = torch.arange(scene.n, device=scores.device)
        touched = torch.stack([cut.rows.touches(positions) for cut in bias.cuts]).any(0).nonzero().flatten()
        columns = bias.columns.to(scores.device)
        add = bias.at(touched).to(scores.dtype)
        scores[:, :, touched[:, None], columns[None, :]] += add
        return scores

    return edit


def _zero_hook(rows: Sequence[tuple[int, int]]) -> Callable[[Tensor, Any], Tensor]:
    heads, queries = (list(part) for part in zip(*rows, strict=True))

    def edit(pattern: Tensor, hook: Any) -> Tensor:
        # A silenced row has no keys left; the softmax has filled it with invisible ones.
        pattern[:, heads, queries] = 0
        return pattern

    return edit

"""An arm as TransformerLens hooks: the same intervention in ``run_with_hooks``, the slow way.

The hooks expect one uncached run over the whole prompt without left pads (``prompt.ids[prompt.pad:][None]``); any other
shape is an error. What they edit keeps its dtype and device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvprobe.errors import InterventionError, quote
from kvprobe.interventions.effects import CELLS, Gate, Swap, stream_order
from kvprobe.interventions.plan import ArmBias, Scene, compile_arms
from kvprobe.twopart import cap, visible

Hook = tuple[str, Callable[[Tensor, Any], Any]]
OUTPUTS = {"attention": "attn.hook_out", "mlp": "mlp.hook_out", "block": "hook_out"}


class Hooked:
    """What every intervention can do: become hooks."""

    def fwd_hooks(self, model: Any, prompt: Any, suffix: int | None = None) -> list[Hook]:
        """The same intervention for TransformerLens: ``model.bridge.run_with_hooks(ids, fwd_hooks=…)``."""
        return fwd_hooks(model, prompt, [self], suffix)


def fwd_hooks(model: Any, prompt: Any, arm: Sequence[Any], suffix: int | None = None) -> list[Hook]:
    """Hooks of several interventions applied together, for one uncached run over the whole prompt.

    Parameters
    ----------
    model, prompt
        As for :func:`kvprobe.intervene`.
    arm
        Interventions that make one arm.
    suffix
        Number of trailing prompt tokens that ``queries="suffix"`` means.

    Returns
    -------
    list of (hook name, function)
        For ``model.bridge.run_with_hooks(prompt.ids[prompt.pad:][None], fwd_hooks=…, prepend_bos=False)``.
    """
    if not hasattr(model, "scene"):
        raise InterventionError(f"{quote(model)} is not a loaded model: allowed is what kvprobe.load(…) returns")
    if not hasattr(prompt, "ids"):
        raise InterventionError(f"{quote(prompt)} is not a prompt: allowed is a Prompt")
    scene = model.scene(prompt, suffix)
    plan = compile_arms([_parts(arm)], scene)
    rows = [(layer, head, query - scene.offset) for layer, head, query in plan.silenced[0]]
    hooks: list[Hook] = []
    for layer in sorted({*plan.layers, *plan.effects}):
        effects = plan.effects.get(layer, {}).get(0, ())
        swaps = [effect for effect in effects if isinstance(effect, Swap)]
        patched = _Patched(swaps, scene, model.geometry, layer)
        if swaps:
            hooks += patched.before()
        if 0 in plan.layers.get(layer, {}):
            hooks.append((_attn(layer, "hook_attn_scores"), score_hook(plan.layers[layer][0], scene)))
        silenced = [(head, query) for at, head, query in rows if at == layer]
        if silenced:
            hooks.append((_attn(layer, "hook_pattern"), _zero_hook(silenced)))
        gates = [effect for effect in effects if isinstance(effect, Gate)]
        if gates:
            hooks.append((_attn(layer, "hook_pattern"), _gate_hook(gates)))
        if swaps:
            hooks += patched.after()
        hooks += _stream_hooks(layer, [effect for effect in effects if effect.site not in CELLS], scene)
    return hooks


def _parts(arm: Any) -> tuple[Any, ...]:
    """The interventions of one arm; one may be given bare."""
    several = isinstance(arm, Sequence) and not isinstance(arm, str)
    parts = (arm,) if hasattr(arm, "cuts") else tuple(arm) if several else (None,)
    if not all(hasattr(part, "cuts") and not isinstance(part, type) for part in parts):
        raise InterventionError(f"arm={quote(arm)} is not allowed: give an intervention or several that make one arm")
    return parts


def score_hook(bias: ArmBias, scene: Scene) -> Callable[[Tensor, Any], Tensor]:
    """A TransformerLens hook that adds the bias to one whole uncached run's scores, in place."""

    def edit(scores: Tensor, hook: Any) -> Tensor:
        _whole(scores, hook, scene)
        positions = torch.arange(scene.n, device=scores.device)
        touched = torch.stack([cut.rows.touches(positions) for cut in bias.cuts]).any(0).nonzero().flatten()
        columns = bias.columns.to(scores.device)
        add = bias.at(touched).to(scores.dtype)
        scores[:, :, touched[:, None], columns[None, :]] += add
        return scores

    return edit


def _attn(layer: int, name: str) -> str:
    return f"blocks.{layer}.attn.{name}"


def _whole(scores: Tensor, hook: Any, scene: Scene) -> None:
    if scores.shape[-1] != scene.n or scores.shape[-2] != scene.n:
        raise InterventionError(
            f"{hook.name}: scores of shape {tuple(scores.shape)}, but these hooks are for one uncached run over "
            f"{scene.n} tokens"
        )


def _zero_hook(rows: Sequence[tuple[int, int]]) -> Callable[[Tensor, Any], Tensor]:
    heads, queries = (list(part) for part in zip(*rows, strict=True))

    def edit(pattern: Tensor, hook: Any) -> Tensor:
        # A silenced row has no keys left; the softmax has filled it with invisible ones.
        pattern[:, heads, queries] = 0
        return pattern

    return edit


def _gate_hook(gates: Sequence[Gate]) -> Callable[[Tensor, Any], Tensor]:
    def edit(pattern: Tensor, hook: Any) -> Tensor:
        positions = torch.arange(pattern.shape[-2], device=pattern.device)
        for gate in gates:
            heads = torch.tensor(range(pattern.shape[1]) if gate.heads is None else gate.heads, device=pattern.device)
            rows = gate.rows.touches(positions).nonzero().flatten()
            place = (slice(None), heads[:, None, None], rows[None, :, None], gate.columns.to(rows.device)[None, None])
            pattern[place] = pattern[place] * gate.scale
        return pattern

    return edit


def _stream_hooks(layer: int, effects: Sequence[Any], scene: Scene) -> list[Hook]:
    """Removals and additions at module outputs; a block's input is noted where it is to be put back."""
    kept: dict[str, Tensor] = {}

    def note(hidden: Tensor, hook: Any) -> None:
        kept["block"] = hidden.detach().clone()

    def edit(effect: Any) -> Callable[[Tensor, Any], Tensor]:
        def rewrite(output: Tensor, hook: Any) -> Tensor:
            if output.shape[1] != scene.n:
                raise InterventionError(
                    f"{hook.name}: {output.shape[1]} rows, but these hooks are for one run over {scene.n} tokens"
                )
            output = output.clone()
            for row in range(output.shape[0]):
                effect.apply(output[row], kept.get("block", output)[row], torch.arange(scene.n, device=output.device))
            return output

        return rewrite

    hooks: list[Hook] = []
    if any(effect.site == "block" for effect in effects):
        hooks.append((f"blocks.{layer}.hook_in", note))
    return hooks + [(f"blocks.{layer}.{OUTPUTS[effect.site]}", edit(effect)) for effect in stream_order(effects)]


class _Patched:
    """A layer's swaps as hooks: rewritten scores, and what the other values add to z."""

    def __init__(self, swaps: Sequence[Swap], scene: Scene, geometry: Any, layer: int) -> None:
        self.swaps, self.scene, self.layer, self.geometry = swaps, scene, layer, geometry
        self.kept: dict[str, Tensor] = {}

    def before(self) -> list[Hook]:
        """Queries are noted, then the scores of the swapped keys written."""
        if all(swap.keys is None for swap in self.swaps):
            return []
        name = "hook_rot_q" if self.geometry.rotary else "hook_q"
        return [(_attn(self.layer, name), self._keep("q")), (_attn(self.layer, "hook_attn_scores"), self._scores)]

    def after(self) -> list[Hook]:
        """The final weights and the old values are noted, then the difference added to z."""
        names = (("hook_v", self._keep("v")), ("hook_pattern", self._keep("pattern")), ("hook_z", self._z))
        return [(_attn(self.layer, name), function) for name, function in names]

    def _keep(self, name: str) -> Callable[[Tensor, Any], None]:
        def keep(tensor: Tensor, hook: Any) -> None:
            self.kept[name] = tensor.detach()

        return keep

    def _cells(self, swap: Swap, device: Any) -> tuple[list[int], Tensor, Tensor]:
        heads = list(range(self.geometry.n_heads) if swap.heads is None else swap.heads)
        rows = swap.rows.touches(torch.arange(self.scene.n, device=device)).nonzero().flatten()
        return heads, rows, swap.columns.to(device)

    def _queries(self, hook: Any) -> Tensor:
        """The rotated queries of this run, noted before its scores; not every bridge shows them."""
        if "q" not in self.kept:
            raise InterventionError(
                f"{hook.name}: TransformerLens shows no queries as they meet the keys in this model, so that a patch "
                'of keys cannot be a hook; allowed: kvprobe.intervene, or what="v"'
            )
        return self.kept.pop("q")

    def _scores(self, scores: Tensor, hook: Any) -> Tensor:
        _whole(scores, hook, self.scene)
        q = self._queries(hook)
        for swap in self.swaps:
            if swap.keys is None:
                continue
            heads, rows, columns = self._cells(swap, scores.device)
            unseen = ~visible(rows, columns, self.geometry.windows[self.layer])
            for head in heads:
                query = q[:, rows, head].float() * self.geometry.scales[self.layer]
                logits = query @ swap.keys[head // self.geometry.group].float().T
                logits = cap(logits, self.geometry.softcaps[self.layer])
                old = scores[:, head, rows[:, None], columns]
                scores[:, head, rows[:, None], columns] = torch.where(unseen, old, logits.to(scores.dtype))
        return scores

    def _z(self, z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        for swap in self.swaps:
            if swap.values is None:
                continue
            heads, rows, columns = self._cells(swap, z.device)
            for head in heads:
                group = head // self.geometry.group
                change = swap.values[group].to(z) - self.kept["v"][:, columns, group]
                z[:, rows, head] += self.kept["pattern"][:, head, rows[:, None], columns] @ change
        return z

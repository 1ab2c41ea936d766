"""What each layer of the twin adds to, and leaves in, the residual stream, read off a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvprobe import engine
from kvprobe.attention import Run, serving
from kvprobe.errors import ModelError


@dataclass(frozen=True)
class Streams:
    """The last rows of one arm at every layer; names as in TransformerLens.

    Attributes
    ----------
    attn_out
        [L, rows, D] output of the attention module, projection and its bias included, before any norm behind it.
    resid_post
        [L, rows, D] hidden state after the layer (before the model's final norm).
    """

    attn_out: Tensor
    resid_post: Tensor


@dataclass
class Tap:
    """Collects the last ``rows`` rows of every layer while a pass runs: layer → [B, rows, D]."""

    rows: int
    attn_out: dict[int, Tensor] = field(default_factory=dict)
    resid_post: dict[int, Tensor] = field(default_factory=dict)

    def arm(self, row: int) -> Streams:
        """The streams of one arm of the batch (copies: the batch can be freed)."""
        parts = ([kept[layer][row].cpu() for layer in sorted(kept)] for kept in (self.attn_out, self.resid_post))
        return Streams(*(torch.stack(part) for part in parts))


@contextmanager
def tapped(twin: Any, n_layers: int, rows: int, run: Run | None = None) -> Iterator[Tap]:
    """Hooks on every attention module and on the layer around it; always removed, also on exceptions.

    With ``run`` only its own passes are read: another thread may be using the same twin.
    """
    tap, handles = Tap(rows), []
    modules = engine.attention_modules(twin, n_layers)
    try:
        for layer, (module, around) in enumerate(zip(modules, _parents(twin, modules), strict=True)):
            handles.append(module.register_forward_hook(_of(run, _keeper(tap.attn_out, layer, rows))))
            handles.append(around.register_forward_hook(_of(run, _keeper(tap.resid_post, layer, rows))))
        yield tap
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watched(twin: Any, n_layers: int, watch: Callable[[int, Tensor], None], run: Run | None = None) -> Iterator[None]:
    """Call ``watch(layer, hidden)`` with what enters every layer, [B, t, D], while a pass runs; always undone.

    ``hidden`` is the residual stream before the layer's first norm (``resid_pre`` in TransformerLens): the pass' own
    tensor, to be read and not to be kept, so that only one layer's exists at a time. ``run`` as in :func:`tapped`.
    """
    handles = []
    try:
        for layer, around in enumerate(_parents(twin, engine.attention_modules(twin, n_layers))):
            handles.append(around.register_forward_pre_hook(_watcher(watch, layer, run), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watcher(watch: Callable[[int, Tensor], None], layer: int, run: Run | None) -> Any:
    def look(module: Any, args: Any, kwargs: Any) -> None:
        if run is None or serving() is run:
            watch(layer, (args[0] if args else kwargs["hidden_states"]).detach())

    return look


@dataclass
class Edited:
    """What hooks did to module outputs in one run's passes: (layer, arm, site) → rows rewritten."""

    run: Run
    rows: dict[tuple[int, int, str], int] = field(default_factory=dict)


@contextmanager
def edited(twin: Any, n_layers: int, effects: Mapping[int, Mapping[int, Sequence[Any]]], run: Run) -> Iterator[Edited]:
    """Hooks that rewrite outputs of attention, MLP or block in the passes of ``run``, and in no other thread's.

    ``effects`` is layer → arm → effects in their order, each with ``site`` and ``apply(output, before, positions)``.
    """
    done, handles = Edited(run), []
    try:
        for layer, module, site in _sites(twin, n_layers, effects):
            chosen = {arm: [e for e in some if e.site == site] for arm, some in effects[layer].items()}
            handles.append(module.register_forward_hook(_editor(done, layer, site, chosen), with_kwargs=True))
        yield done
    finally:
        for handle in handles:
            handle.remove()


def _sites(
    twin: Any, n_layers: int, effects: Mapping[int, Mapping[int, Sequence[Any]]]
) -> Iterator[tuple[int, Any, str]]:
    """(layer, module, site) of every module that some effect names."""
    if not effects:
        return
    modules = engine.attention_modules(twin, n_layers)
    around = _parents(twin, modules)
    for layer in sorted(effects):
        for site in sorted({effect.site for some in effects[layer].values() for effect in some}):
            found = {"attention": modules[layer], "block": around[layer]}
            yield layer, found[site] if site in found else engine.mlp_module(around[layer]), site


def _editor(done: Edited, layer: int, site: str, chosen: Mapping[int, Sequence[Any]]) -> Any:
    def edit(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if serving() is not done.run:
            return None
        whole = output[0] if isinstance(output, tuple) else output
        before = args[0] if args else kwargs["hidden_states"]
        flat = whole.dim() == 2  # some mixtures of experts return rows without a batch dimension
        new = whole.reshape(before.shape).clone() if flat else whole.clone()
        positions = torch.arange(done.run.start, done.run.start + new.shape[1], device=new.device)
        for arm, some in chosen.items():
            for effect in some:
                key = layer, arm, site
                done.rows[key] = done.rows.get(key, 0) + effect.apply(new[arm], before[arm], positions)
        new = new.reshape(whole.shape)
        return (new, *output[1:]) if isinstance(output, tuple) else new

    return edit


def _of(run: Run | None, hook: Any) -> Any:
    """The hook for passes of ``run`` alone; for all without one."""
    return hook if run is None else lambda *call: hook(*call) if serving() is run else None


def _keeper(kept: dict[int, Tensor], layer: int, rows: int) -> Any:
    def keep(module: Any, args: Any, output: Any) -> None:
        whole = output[0] if isinstance(output, tuple) else output
        kept[layer] = whole[:, -rows:].detach().clone()

    return keep


def _parents(twin: Any, modules: Any) -> list[Any]:
    """The module that each of ``modules`` is a direct child of: the decoder layer."""
    names = {id(module): name for name, module in twin.named_modules()}
    above = [names[id(module)].rpartition(".")[0] for module in modules]
    if not all(above):
        raise ModelError(f"{type(twin).__name__} has attention outside a layer: its hidden states cannot be read")
    return [twin.get_submodule(name) for name in above]

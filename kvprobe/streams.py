"""What each layer of the twin adds to, and leaves in, the residual stream, read off a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvprobe import engine
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
def tapped(twin: Any, n_layers: int, rows: int) -> Iterator[Tap]:
    """Hooks on every attention module and on the layer around it; always removed, also on exceptions."""
    tap, handles = Tap(rows), []
    modules = engine.attention_modules(twin, n_layers)
    try:
        for layer, (module, around) in enumerate(zip(modules, _parents(twin, modules), strict=True)):
            handles.append(module.register_forward_hook(_keeper(tap.attn_out, layer, rows)))
            handles.append(around.register_forward_hook(_keeper(tap.resid_post, layer, rows)))
        yield tap
    finally:
        for handle in handles:
            handle.remove()


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

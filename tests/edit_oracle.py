"""Plain transformers with an attention function of our own: weights scaled, keys and values exchanged, by loops.

Nothing here is kvprobe's. A donor's keys at other positions are made by running the donor at shifted position ids:
hidden states of a rotary model do not notice, its keys come out rotated to where they are wanted.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NAME = "loops_of_the_tests"
_STATE: dict[str, Any] = {"edits": [], "seen": None}


@dataclass
class CellEdit:
    """Keys × rows × heads × layers: a factor on weights, or other keys and values (layer → [K, C, d])."""

    columns: list[int]
    rows: list[int]
    heads: list[int]
    layers: list[int]
    scale: float | None = None
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    bias: float = 0.0


def attention(module, query, key, value, mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **_):
    """One softmax a row, over a Python list of visible keys."""
    layer, (heads, n, d) = int(module.layer_idx), query.shape[1:]
    group = heads // key.shape[1]
    if _STATE["seen"] is not None:
        _STATE["seen"][layer] = (key[0].clone(), value[0].clone())
    out = torch.zeros(1, n, heads, value.shape[-1], dtype=query.dtype)
    for head in range(heads):
        for row in range(n):
            low = 0 if sliding_window is None else max(0, row - sliding_window + 1)
            keys, values = key[0, head // group], value[0, head // group]
            factor, bias = torch.ones(n, dtype=query.dtype), torch.zeros(n, dtype=query.dtype)
            for edit in _STATE["edits"]:
                if layer in edit.layers and head in edit.heads and row in edit.rows:
                    keys, values = keys.clone(), values.clone()
                    for place, column in enumerate(edit.columns):
                        if edit.keys:
                            keys[column] = edit.keys[layer][head // group, place]
                        if edit.values:
                            values[column] = edit.values[layer][head // group, place]
                        if edit.scale is not None:
                            factor[column] *= edit.scale
                        bias[column] += edit.bias
            logits = keys[low : row + 1] @ query[0, head, row] * (d**-0.5 if scaling is None else scaling)
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            logits = logits + bias[low : row + 1]
            if s_aux is not None:
                logits = torch.cat([logits, s_aux[head : head + 1].to(logits)])
            weights = logits.softmax(-1)[: row + 1 - low] * factor[low : row + 1]
            out[0, row, head] = weights @ values[low : row + 1]
    return out, None


class Edited:
    """A fresh transformers model whose attention is the function above."""

    def __init__(self, folder):
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
        self.hf = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME, dtype=torch.float32).eval()
        self.n_layers = self.hf.config.num_hidden_layers

    def __call__(self, ids, edits=(), streams=(), shift=0):
        """Logits [n, vocab]. ``streams``: (layer, site, rows, vectors or None to remove) at module outputs."""
        _STATE["edits"] = list(edits)
        positions = torch.arange(len(ids))[None] + shift
        try:
            with torch.no_grad(), self._hooked(streams):
                return self.hf(torch.tensor(ids)[None], position_ids=positions, use_cache=False).logits[0]
        finally:
            _STATE["edits"] = []

    def cache(self, ids, shift=0):
        """layer → (rotated keys, values) [K, n, d]."""
        _STATE["seen"] = {}
        try:
            self(ids, shift=shift)
            return dict(_STATE["seen"])
        finally:
            _STATE["seen"] = None

    @contextmanager
    def _hooked(self, streams):
        blocks = next(m for m in self.hf.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == self.n_layers)
        handles = []
        for layer, site, rows, vectors in streams:
            block = blocks[layer]
            attn = next(m for name, m in block.named_children() if name in ("self_attn", "attn"))
            module = {"block": block, "attention": attn, "mlp": block.mlp}[site]
            handles.append(module.register_forward_hook(_rewrite(site, rows, vectors), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _rewrite(site, rows, vectors):
    def hook(module, args, kwargs, output):
        whole = (output[0] if isinstance(output, tuple) else output).clone()
        shape = whole.shape
        whole = whole.reshape(1, -1, shape[-1])
        for place, row in enumerate(rows):
            if vectors is not None:
                whole[0, row] += vectors if vectors.dim() == 1 else vectors[place]
            elif site == "block":
                whole[0, row] = (args[0] if args else kwargs["hidden_states"])[0, row]
            else:
                whole[0, row] = 0.0
        whole = whole.reshape(shape)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    return hook

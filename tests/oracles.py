"""Slow oracles: plain transformers with an additive 4-D mask of one's own, and loops. Nothing here is kvprobe's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PROJECTIONS = ("o_proj", "c_proj", "dense")


@dataclass(frozen=True)
class Cutout:
    """What a mask says, resolved by hand: key spans, layers, heads by layer, the queries that lose them, and β."""

    keys: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]
    heads: dict[int, tuple[int, ...]]
    queries: str | tuple[int, ...]
    beta: float = math.inf
    keep_self: bool = False

    def loses(self, query: int, span: tuple[int, int], n: int, suffix: int) -> bool:
        """Whether a query lies in the rows that the mask names."""
        if not isinstance(self.queries, str):
            return query in self.queries
        return query >= {"suffix": n - suffix, "after": span[1], "generated": n}[self.queries]


def bias_table(cutouts, total, *, n, suffix, n_layers, n_heads) -> Tensor:
    """[L, H, total, total] additive bias by loops over layers, heads, queries and keys."""
    table = torch.zeros(n_layers, n_heads, total, total)
    for cutout in cutouts:
        for layer in cutout.layers:
            for head in cutout.heads[layer]:
                for query in range(total):
                    lost = {k for span in cutout.keys if cutout.loses(query, span, n, suffix) for k in range(*span)}
                    for key in lost - ({query} if cutout.keep_self else set()):
                        table[layer, head, query, key] -= cutout.beta
    return table


@dataclass(frozen=True)
class Answer:
    """Logits [n, vocab] and attention [L, H, n, n] of one prompt."""

    logits: Tensor
    attention: Tensor


class Plain:
    """A fresh transformers model with eager attention, whose every layer is handed a 4-D mask of our own making."""

    def __init__(self, folder, dtype=torch.float32):
        from transformers import AutoModelForCausalLM

        self.hf = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()
        self.hf.set_experts_implementation("eager")  # the default one has no fp64
        config = self.hf.config
        self.n_layers, self.n_heads = config.num_hidden_layers, config.num_attention_heads
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * self.n_layers
        self.windows = [window if kind == "sliding_attention" else None for kind in kinds]
        self.sinks = hasattr(self._modules()[0], "sinks")

    def _modules(self):
        found = [m for m in self.hf.modules() if hasattr(m, "layer_idx") and any(hasattr(m, p) for p in PROJECTIONS)]
        assert [module.layer_idx for module in found] == list(range(self.n_layers))
        return found

    def visible(self, layer: int, n: int) -> Tensor:
        """Boolean [n, n] by loops: a key not after the query, and within the window, which counts the query itself."""
        window = self.windows[layer] or n
        return torch.tensor([[q - window < k <= q for k in range(n)] for q in range(n)])

    def silenced(self, table: Tensor) -> Tensor:
        """Boolean [L, H, n]: rows that lose every key they see, which only a learned sink can survive."""
        n = table.shape[-1]
        dead = torch.stack([(table[i] == -torch.inf) | ~self.visible(i, n) for i in range(self.n_layers)]).all(-1)
        return dead & (not self.sinks)

    def __call__(self, ids, table: Tensor | None = None) -> Answer:
        """One uncached run. A silenced row's head output is set to 0 where it enters the output projection."""
        ids = torch.as_tensor(ids)
        n = len(ids)
        table = torch.zeros(self.n_layers, self.n_heads, n, n) if table is None else table
        silenced, handles = self.silenced(table), []
        for layer, module in enumerate(self._modules()):
            mask = table[layer].masked_fill(~self.visible(layer, n), -torch.inf)
            mask = mask.masked_fill(silenced[layer][..., None] & torch.eye(n, dtype=torch.bool), 0.0)
            mask = mask[None].to(next(self.hf.parameters()).dtype)
            handles.append(module.register_forward_pre_hook(_give(mask), with_kwargs=True))
            projection = next(getattr(module, name) for name in PROJECTIONS if hasattr(module, name))
            handles.append(projection.register_forward_pre_hook(_zero(silenced[layer])))
        try:
            with torch.no_grad():
                out = self.hf(input_ids=ids[None], use_cache=False, output_attentions=True)
        finally:
            for handle in handles:
                handle.remove()
        attention = torch.stack(out.attentions)[:, 0].masked_fill(silenced[..., None], 0.0)
        return Answer(out.logits[0], attention)

    def greedy(self, ids, steps: int, table_of, eos=()) -> list[int]:
        """Decode without any cache: every token from a fresh run over everything so far."""
        ids, found = list(ids), []
        for _ in range(steps):
            token = int(self(ids, table_of(len(ids))).logits[-1].argmax())
            if token in eos:
                break
            found.append(token)
            ids.append(token)
        return found


def _give(mask):
    def hook(module, args, kwargs):
        assert "attention_mask" in kwargs
        return args, kwargs | {"attention_mask": mask}

    return hook


def _zero(silenced):
    def hook(module, args):
        flat = args[0]
        heads = flat.unflatten(-1, (silenced.shape[0], -1))
        return (heads.masked_fill(silenced.T[None, ..., None], 0.0).flatten(-2), *args[1:])

    return hook

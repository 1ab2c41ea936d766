"""Attention outputs and hidden states of plain transformers."""

import torch
from oracles import PROJECTIONS


def plain_streams(reference, ids, table=None):
    """(attn_out, resid_post), each [L, n, D], by forward hooks of our own on plain transformers."""
    modules = [m for m in reference.hf.modules() if hasattr(m, "layer_idx") and any(hasattr(m, p) for p in PROJECTIONS)]
    blocks = next(m for m in reference.hf.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == len(modules))
    found, handles = {"attn_out": {}, "resid_post": {}}, []

    def keeper(kind, layer):
        def hook(module, args, output):
            found[kind][layer] = (output if isinstance(output, torch.Tensor) else output[0])[0].clone()

        return hook

    for layer, (module, block) in enumerate(zip(modules, blocks, strict=True)):
        handles += [module.register_forward_hook(keeper("attn_out", layer))]
        handles += [block.register_forward_hook(keeper("resid_post", layer))]
    try:
        reference(ids, table)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(torch.stack([found[kind][layer] for layer in range(len(modules))]) for kind in found)

"""W_O as the theory reads it: the output projection of an attention module by query head, dequantised where needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvprobe.errors import ModelError

NAMES = ("o_proj", "c_proj", "out_proj", "dense", "wo")
"""Children of an attention module that project its heads back; which one it is gets verified numerically at load."""

BITSANDBYTES = ("Int8Params", "Params4bit")


def output_weights(module: Any, n_heads: int) -> Tensor:
    """W_O of an attention module per query head, [H, d_v, D]; views of the weight unless it had to be dequantised.

    Linear stores [D, H·d_v], GPT-2's Conv1D [H·d_v, D]. Weights of 8 or 4 bits are read through what their backend
    offers (bitsandbytes, torchao and other tensor classes with a ``dequantize`` of their own, modules that have one,
    torch's quantised tensors); the copy is made anew at each call and not kept.

    Raises
    ------
    ModelError
        No projection of a known name, or a weight that nothing takes back to floating point: it is named.
    """
    for name in NAMES:
        child = getattr(module, name, None)
        if child is None:
            continue
        weight = _dense(child, f"{type(module).__name__}.{name}")
        matrix = weight if type(child).__name__ == "Conv1D" else weight.T
        return matrix.detach().view(n_heads, -1, matrix.shape[1]) if matrix.is_contiguous() else _split(weight, n_heads)
    raise ModelError(f"{type(module).__name__} has no output projection that kvprobe knows ({', '.join(NAMES)})")


def output_bias(module: Any) -> Tensor | None:
    """The bias of the output projection, or None."""
    for name in NAMES:
        if hasattr(module, name):
            bias = getattr(getattr(module, name), "bias", None)
            return bias() if callable(bias) else bias  # torch's quantised modules have methods
    return None


def _split(weight: Tensor, n_heads: int) -> Tensor:
    """[D, H·d] → [H, d, D] as a view."""
    return weight.detach().unflatten(1, (n_heads, -1)).permute(1, 2, 0)


def _dense(child: Any, path: str) -> Tensor:
    """The weight of a projection in floating point: itself, or a dequantised copy."""
    weight = getattr(child, "weight", None)
    weight = weight() if callable(weight) and not isinstance(weight, Tensor) else weight
    try:
        found = _dequantised(child, weight)
    except Exception as error:  # kernels of quantised weights raise what they like, for instance on another device
        raise _refusal(path, weight, f": {' '.join(str(error).split())[:150]}") from error
    if found is None:
        raise _refusal(path, weight, "")
    return found


def _dequantised(child: Any, weight: Any) -> Tensor | None:
    if not isinstance(weight, Tensor):
        return child.dequantize() if callable(getattr(child, "dequantize", None)) else None
    if type(weight).__name__ in BITSANDBYTES and not weight.is_floating_point():
        if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
            return _of_identity(child)
        from transformers.integrations.bitsandbytes import dequantize_bnb_weight

        return dequantize_bnb_weight(weight, getattr(child, "state", None))
    # Every tensor has a ``dequantize``, which of plain integers makes the codes as numbers, without their scales.
    if weight.is_quantized or type(weight).dequantize is not Tensor.dequantize:
        return weight.dequantize()
    return weight if weight.is_floating_point() and weight.element_size() > 1 else None


def _of_identity(child: Any) -> Tensor:
    """What a projection does to the identity: its weight as it computes with it, for layouts that only it can read."""
    bias = getattr(child, "bias", None)
    like = torch.float32 if bias is None else bias.dtype
    device = child.weight.device
    with torch.no_grad():
        rows = child(torch.eye(child.in_features, dtype=like, device=device))
    return (rows if bias is None else rows - bias).T


def _refusal(path: str, weight: Any, reason: str) -> ModelError:
    kind = f" ({type(weight).__name__})" if type(weight) not in (Tensor, torch.nn.Parameter, type(None)) else ""
    return ModelError(
        f"{path}.weight is stored as {getattr(weight, 'dtype', None)}{kind}, and nothing takes it back to floating "
        f"point{reason}; allowed: weights of 16 bits or more, and 8 or 4 bits whose backend dequantises them "
        "(bitsandbytes, torchao, …): load the model unquantised"
    )

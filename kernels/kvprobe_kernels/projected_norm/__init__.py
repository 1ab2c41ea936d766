"""‖x W_O‖_p of every cached value and head, without ever writing the projected values."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprobe_kernels.dispatch import KernelError, implementation

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_GROUPS = ("mean", "none")


@torch.no_grad()
def projected_norm(
    V: Tensor, W_O: Tensor, p: int = 1, group: str = "mean", *, centre: Tensor | None = None, backend: str = "torch"
) -> Tensor:
    """Projected value norms m[h, i] = ‖V[h // G, i] W_O[h] − centre[h]‖_p, G = H // K.

    Equal to, and checked against, the slow line ``(V[h // G] @ W_O[h] - centre[h]).norm(p, dim=-1)`` for each head.

    Parameters
    ----------
    V : Tensor ``[*B, K, n, d]``
        Values of the K kv heads; any number of leading batch dimensions. float16, bfloat16, float32 or float64.
    W_O : Tensor ``[H, d, D]``
        The output projection, one slice a query head; a strided view such as ``weight.T.view(H, d, D)`` is not copied.
    p : {1, 2}
        The norm. p = 2 works on the d × d factor of W_O W_Oᵀ: D / d times less work.
    group : {"mean", "none"}
        The mean over the G query heads of each kv head, or every query head.
    centre : Tensor ``[*B, H, D]``, optional
        Point that the projected values are measured from; 0 if not given.
    backend : {"torch", "reference", "triton"}
        Which implementation runs; it is never exchanged for another.

    Returns
    -------
    Tensor ``[*B, K, n]`` or ``[*B, H, n]``
        The norms, for "mean" or "none". float32; float64 if an input is and the backend is not triton. No gradient.

    Raises
    ------
    KernelError
        Shapes, dtypes or devices do not fit, p, group or backend is unknown, or W_O is not finite and p is 2.

    Notes
    -----
    CriticalKV (Feng et al., arXiv 2502.03805), section 3, for the norms; the factor and the centred form are kvprobe's.
    Rounding is that of a product in the result's precision, eps · ‖x‖ ‖W_O‖, for both p, centred or not; float64 with
    p = 2 and a singular W_O is good to 1e-8 ‖x‖ ‖W_O‖.
    """
    _check_options(p, group)
    _check_tensors(V, W_O, centre)
    run = implementation("projected_norm", backend, V.device)
    if V.numel() == 0:
        heads = V.shape[-3] if group == "mean" else W_O.shape[0]
        wide = backend != "triton" and torch.float64 in (V.dtype, W_O.dtype)
        return V.new_zeros((*V.shape[:-3], heads, V.shape[-2]), dtype=torch.float64 if wide else torch.float32)
    norms: Tensor = run(V, W_O, p, group, centre)
    return norms


def _check_options(p: int, group: str) -> None:
    if isinstance(p, bool) or p not in (1, 2):
        raise KernelError(f"p={p!r}: allowed are 1 and 2")
    if group not in _GROUPS:
        raise KernelError(f"group={group!r}: allowed are {', '.join(map(repr, _GROUPS))}")


def _check_tensors(V: Tensor, W_O: Tensor, centre: Tensor | None) -> None:
    for name, tensor in {"V": V, "W_O": W_O, "centre": centre}.items():
        if tensor is None and name == "centre":
            continue
        if not isinstance(tensor, Tensor):
            raise KernelError(f"{name} is a {type(tensor).__name__}, a torch.Tensor is needed")
        if tensor.dtype not in _DTYPES:
            raise KernelError(f"{name} is {tensor.dtype}: allowed are {', '.join(map(str, _DTYPES))}")
        if tensor.device != V.device:
            raise KernelError(f"{name} is on {tensor.device} and V on {V.device}: one device is needed")
    _check_shapes(V, W_O)
    expected = (*V.shape[:-3], W_O.shape[0], W_O.shape[2])
    if centre is not None and tuple(centre.shape) != expected:
        raise KernelError(f"centre is {list(centre.shape)}: it must be [*B, H, D] = {list(expected)}")


def _check_shapes(V: Tensor, W_O: Tensor) -> None:
    if V.dim() < 3 or 0 in (V.shape[-3], V.shape[-1]):
        raise KernelError(f"V is {list(V.shape)}: it must be [*B, K, n, d] with K and d at least 1")
    if W_O.dim() != 3 or 0 in W_O.shape:
        raise KernelError(f"W_O is {list(W_O.shape)}: it must be [H, d, D] with each at least 1")
    if W_O.shape[1] != V.shape[-1]:
        raise KernelError(f"V has head width d = {V.shape[-1]} and W_O d = {W_O.shape[1]}: they must be equal")
    if W_O.shape[0] % V.shape[-3]:
        raise KernelError(f"W_O has H = {W_O.shape[0]} heads and V K = {V.shape[-3]}: H must be a multiple of K")

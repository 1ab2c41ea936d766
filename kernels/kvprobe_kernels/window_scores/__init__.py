"""SnapKV's scores: the attention that the last queries pay to each earlier key. Equal to the lines in reference.py."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from kvprobe_kernels.dispatch import KernelError, implementation

_POOLS = ("avg", "max", "none")
_GROUPS = ("mean", "max", "none")


def window_scores(
    Q: Tensor,
    K: Tensor,
    pool: str = "avg",
    kernel: int = 5,
    group: str = "mean",
    *,
    scale: float | None = None,
    alive: Tensor | None = None,
    backend: str = "torch",
) -> Tensor:
    """Score each key before an observation window by the window's attention to it, pooled over positions.

    A = softmax over all n keys of scale · q kᵀ, where row r of the window sees positions up to n - w + r; the window's
    own columns are dropped after the softmax; then the mean over the w rows, the pooling over positions, and the
    reduction over the G = H / Kh query heads of each kv head, in this order (max-pooling and the group mean do not
    commute). The softmax is in fp32 whatever the inputs are. Follows SnapKV (arXiv 2404.14469); ``pool="avg"`` as in
    the code released with CriticalKV (arXiv 2502.03805).

    Parameters
    ----------
    Q : Tensor, [*B, H, w, d]
        The rotated queries of the last w positions.
    K : Tensor, [*B, Kh, n, d]
        The rotated keys of all n positions, w ≤ n. Query head h reads kv head h // G; K is not repeated.
    pool : {"avg", "max", "none"}
        Centred window of ``kernel`` positions: ``avg`` takes zeros beyond both ends and always divides by ``kernel``;
        ``max`` takes what there is.
    kernel : int
        Odd width of the pooling window, in positions.
    group : {"mean", "max", "none"}
        Reduction over the query heads of a kv head.
    scale : float, optional
        Factor of the logits; d ** -0.5 if not given.
    alive : bool Tensor, [*B, Kh, n], optional
        False marks an evicted key: its logit is -inf, its score before pooling 0. A row without a living key has weight
        0 everywhere, and still counts in the mean over the window.
    backend : {"torch", "reference", "triton"}
        ``triton`` computes in fp32 only.

    Returns
    -------
    Tensor, [*B, Kh, n - w], or [*B, H, n - w] for ``group="none"``
        fp32 (fp64 for fp64 inputs).

    Raises
    ------
    KernelError
        An argument outside the above, named with what is allowed.
    """
    _check_tensors(Q, K, alive, backend)
    _check_options(pool, kernel, group, scale)
    run = implementation("window_scores", backend, Q.device)
    (*lead, kv_heads, n, d), heads, w = K.shape, Q.shape[-3], Q.shape[-2]
    out = heads if group == "none" else kv_heads
    if not math.prod(lead) or w == n:
        return torch.zeros((*lead, out, n - w), dtype=_result(Q, K), device=Q.device)
    queries = Q.detach().reshape(-1, heads // kv_heads, w, d)
    living = None if alive is None else alive.reshape(-1, n)
    width = 1 if pool == "none" else kernel
    factor = d**-0.5 if scale is None else float(scale)
    scores: Tensor = run(queries, K.detach().reshape(-1, n, d), living, factor, pool, width, group)
    return scores.reshape(*lead, out, n - w)


def _result(Q: Tensor, K: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (Q.dtype, K.dtype) else torch.float32


def _check_tensors(Q: Tensor, K: Tensor, alive: Tensor | None, backend: str) -> None:
    for name, value in {"Q": Q, "K": K, "alive": alive}.items():
        if not isinstance(value, Tensor) and (value is not None or name != "alive"):
            raise KernelError(f"{name} is a {type(value).__name__}: a torch.Tensor is needed")
    for name, tensor, axes in (("Q", Q, "[*B, H, w, d]"), ("K", K, "[*B, Kh, n, d]")):
        if tensor.dim() < 3 or not tensor.is_floating_point() or 0 in tensor.shape[-3:]:
            given = f"{name} is {tensor.dtype} {list(tensor.shape)}"
            raise KernelError(f"{given}: allowed are floating-point {axes}, none empty")
    q, k = list(Q.shape), list(K.shape)
    if q[:-3] != k[:-3] or q[-1] != k[-1]:
        raise KernelError(f"Q is {q} and K is {k}: allowed are the same leading dimensions and the same d")
    if q[-3] % k[-3]:
        raise KernelError(f"Q has {q[-3]} heads and K has {k[-3]}: allowed is a multiple of K's heads")
    if q[-2] > k[-2]:
        raise KernelError(f"the window has {q[-2]} queries for {k[-2]} keys: allowed are 1 to {k[-2]}")
    if alive is not None and (alive.dtype != torch.bool or alive.shape != K.shape[:-1]):
        raise KernelError(f"alive is {alive.dtype} {list(alive.shape)}: allowed is bool {k[:-1]}, one entry a key")
    if backend == "triton" and _result(Q, K) == torch.float64:
        raise KernelError("backend='triton' computes in fp32, given float64: backend='torch' takes it as it is")
    for name, other in (("K", K), ("alive", alive)):
        if other is not None and other.device != Q.device:
            raise KernelError(f"{name} is on {other.device}: allowed is the device of Q, {Q.device}")


def _check_options(pool: str, kernel: object, group: str, scale: object) -> None:
    for name, given, allowed in (("pool", pool, _POOLS), ("group", group, _GROUPS)):
        if given not in allowed:
            raise KernelError(f"{name}={given!r}: allowed are {', '.join(map(repr, allowed))}")
    if isinstance(kernel, bool) or not isinstance(kernel, numbers.Integral) or kernel < 1 or kernel % 2 == 0:
        raise KernelError(f"kernel={kernel!r}: allowed are odd integers from 1, so that the window has a centre")
    if scale is not None and not (isinstance(scale, numbers.Real) and math.isfinite(scale)):
        raise KernelError(f"scale={scale!r}: allowed are finite numbers, or None for d ** -0.5")

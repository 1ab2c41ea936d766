"""Which entries each row keeps: the best by score, then by score times norm. Equal to the lines in reference.py."""

from __future__ import annotations

import math
import numbers
from fractions import Fraction

import torch
from torch import Tensor

from kvprobe_kernels.dispatch import KernelError, implementation

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def two_stage_select(
    scores: Tensor,
    norms: Tensor | None,
    budgets: int | Tensor,
    alpha: float = 0.5,
    epsilon: float = 1e-4,
    protected: Tensor | None = None,
    *,
    at_least: int | Tensor = 0,
    backend: str = "torch",
) -> Tensor:
    """Keep exactly ``budgets`` entries of every row: Algorithm 1 of CriticalKV (arXiv 2502.03805) on b entries.

    Stage 1 holds max(protected entries, ⌊α b⌋, min(at_least, b)) entries: the protected ones, then the best scores.
    Stage 2 fills the row to b with the best of (score + ε) · norm among the rest. The floor is that of the decimal
    number that α is written as. Ties go to the lower position, in every backend, so that all backends keep the same
    entries; -0.0 and 0.0 tie.

    Parameters
    ----------
    scores : Tensor, [*B, J, n]
        Finite, or -inf for an entry that is no candidate and is never kept. The product is taken in fp32 (fp64 for fp64
        scores). A negative score turns stage 2 around, since the smallest norm then wins: shift scores to ≥ 0 first.
    norms : Tensor, [*B, J, n], or None
        Finite and ≥ 0. None keeps the plain top b of the scores.
    budgets : int or integer Tensor, [J] or [*B, J]
        Entries that each row keeps, from its protected entries to its candidates.
    alpha : float
        Stage 1's share of the budget, in [0, 1].
    epsilon : float
        Added to the raw score in stage 2; finite and ≥ 0.
    protected : bool Tensor, [n], [J, n] or [*B, J, n], optional
        Entries that are always kept. They count in the budget and use stage 1's places first.
    at_least : int or integer Tensor, [J] or [*B, J]
        Smallest stage 1, in entries; a row's budget caps it.
    backend : {"torch", "reference", "triton"}
        ``triton`` compares in fp32 only.

    Returns
    -------
    Tensor, bool [*B, J, n]
        True where an entry is kept.

    Raises
    ------
    KernelError
        An argument outside the above, named with its row and what is allowed.
    """
    _check_tensors(scores, norms, protected, backend)
    run = implementation("two_stage_select", backend, scores.device)
    lead, n = scores.shape[:-1], scores.shape[-1]
    rows = math.prod(lead)
    if not rows:
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    work = torch.float64 if scores.dtype == torch.float64 else torch.float32
    flat = scores.detach().to(work).reshape(rows, n)
    flat_norms = None if norms is None else norms.detach().to(work).reshape(rows, n)
    flat_protected = None if protected is None else protected.expand(scores.shape).reshape(rows, n)
    wanted = _per_row("budgets", budgets, lead)
    candidates = _check_values(flat, flat_norms, flat_protected, lead)
    held = [0] * len(wanted) if flat_protected is None else flat_protected.sum(-1).tolist()
    _check_budgets(wanted, held, candidates, lead)
    first = _stage_one(wanted, held, _per_row("at_least", at_least, lead), _share(alpha))
    keep: Tensor = run(flat, flat_norms, flat_protected, first, wanted, _epsilon(epsilon))
    return keep.view(scores.shape)


def _share(alpha: object) -> Fraction:
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real) or not 0 <= float(alpha) <= 1:
        raise KernelError(f"alpha={alpha!r}: allowed are numbers from 0 to 1")
    return Fraction(str(alpha))


def _stage_one(budgets: list[int], held: list[int], at_least: list[int], share: Fraction) -> list[int]:
    """Stage 1's entries in each row. A float's product has the wrong floor: 0.29 * 100 is under 29."""
    up, down = share.numerator, share.denominator
    rows = zip(budgets, held, at_least, strict=True)
    return [max(kept, b * up // down, min(least, b)) for b, kept, least in rows]


def _epsilon(epsilon: object) -> float:
    if isinstance(epsilon, bool) or not isinstance(epsilon, numbers.Real) or not 0 <= float(epsilon) < math.inf:
        raise KernelError(f"epsilon={epsilon!r}: allowed are finite numbers from 0")
    return float(epsilon)


def _check_tensors(scores: Tensor, norms: Tensor | None, protected: Tensor | None, backend: str) -> None:
    for name, tensor in {"scores": scores, "norms": norms, "protected": protected}.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name == "scores"):
            raise KernelError(f"{name} is a {type(tensor).__name__}: a torch.Tensor is needed")
    if scores.dim() < 2 or not scores.is_floating_point():
        raise KernelError(f"scores are {scores.dtype} {list(scores.shape)}: allowed are floating-point [*B, J, n]")
    if backend == "triton" and scores.dtype == torch.float64:
        raise KernelError("backend='triton' compares fp32 scores, given float64: backend='torch' takes them")
    if norms is not None and (norms.shape != scores.shape or not norms.is_floating_point()):
        raise KernelError(
            f"norms are {norms.dtype} {list(norms.shape)}: allowed are floating-point {list(scores.shape)}, as scores"
        )
    tails = {scores.shape, scores.shape[-2:], scores.shape[-1:]}
    if protected is not None and (protected.dtype != torch.bool or protected.shape not in tails):
        raise KernelError(
            f"protected is {protected.dtype} {list(protected.shape)}: allowed are bool [n], [J, n] or [*B, J, n] "
            f"of scores {list(scores.shape)}"
        )
    for name, tensor in (("norms", norms), ("protected", protected)):
        if tensor is not None and tensor.device != scores.device:
            raise KernelError(f"{name} are on {tensor.device}: allowed is the device of scores, {scores.device}")


def _per_row(name: str, value: object, lead: torch.Size) -> list[int]:
    """One Python integer a row: exact arithmetic, and no small tensor operations."""
    rows = math.prod(lead)
    if isinstance(value, Tensor):
        if value.dtype not in _INTEGERS or value.shape not in (lead, lead[-1:], ()):
            allowed = f"integers of shape {[lead[-1]]} or {list(lead)}"
            raise KernelError(f"{name} is {value.dtype} {list(value.shape)}: allowed are an int, or {allowed}")
        whole: list[int] = value.expand(lead).reshape(-1).tolist()
    elif isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise KernelError(f"{name}={value!r}: allowed are an int or an integer tensor [J] or [*B, J]")
    else:
        whole = [int(value)] * rows
    if min(whole) < 0:
        row = whole.index(min(whole))
        raise KernelError(f"{name} is {whole[row]} in {_row(row, lead)}: allowed are integers from 0")
    return whole


def _check_values(scores: Tensor, norms: Tensor | None, protected: Tensor | None, lead: torch.Size) -> list[int]:
    """Refuse what has no order; return each row's number of candidates. One pass a tensor unless something is odd."""
    rows, n = scores.shape
    if not n:
        return [0] * rows
    extremes = [*scores.aminmax(), *(() if norms is None else norms.aminmax())]
    low, high, *of_norms = torch.stack(extremes).tolist()
    if not (low == low and high < math.inf):
        wrong, allowed = ~(scores < math.inf), "finite numbers and -inf (no candidate); protected marks what must stay"
        raise KernelError(f"scores hold {_first(wrong, scores, lead)}: allowed are {allowed}")
    if norms is not None and not (of_norms[0] >= 0 and of_norms[1] < math.inf):
        wrong = ~((norms >= 0) & (norms < math.inf))
        raise KernelError(f"norms hold {_first(wrong, norms, lead)}: allowed are finite numbers from 0")
    if low > -math.inf:
        return [n] * rows
    alive = scores > -math.inf
    if protected is not None and bool((protected & ~alive).any()):
        found = _first(protected & ~alive, scores, lead)
        raise KernelError(f"protected marks an entry that is no candidate, {found}: allowed are finite scores")
    counts: list[int] = alive.sum(-1).tolist()
    return counts


def _check_budgets(budgets: list[int], held: list[int], candidates: list[int], lead: torch.Size) -> None:
    for row, (b, kept, most) in enumerate(zip(budgets, held, candidates, strict=True)):
        if not kept <= b <= most:
            raise KernelError(
                f"budgets is {b} in {_row(row, lead)}: allowed are {kept} (its protected entries) to {most} "
                "(its candidates)"
            )


def _first(wrong: Tensor, values: Tensor, lead: torch.Size) -> str:
    row, position = wrong.nonzero()[0].tolist()
    return f"{values[row, position].item()} at position {position} of {_row(row, lead)}"


def _row(row: int, lead: torch.Size) -> str:
    if len(lead) == 1:
        return f"row {row}"
    place = []
    for size in reversed(lead):
        row, index = divmod(row, size)
        place.append(index)
    return f"row {tuple(reversed(place))}"

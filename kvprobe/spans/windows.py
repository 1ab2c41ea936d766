"""Sums over all spans of one length, by additions only.

A difference of prefix sums is shorter and fatal: beside a sink of 0.9998 a float32 prefix has lost the digits that a
span of 1e-6 would need, and most spans come out at or below zero.
"""

from torch import Tensor


def window_sums(x: Tensor, length: int) -> Tensor:
    """Sum over each window of ``length`` entries along dimension −2, ``[..., n − length + 1, c]``.

    Equals ``x.unfold(-2, length, 1).sum(-1)``. Sums of 1, 2, 4, … neighbours double by one addition each; those that
    the binary digits of ``length`` name add up to the window.
    """
    n_windows = x.shape[-2] - length + 1
    total: Tensor | None = None
    done, size = 0, 1
    while True:
        if length & size:
            part = x.narrow(-2, done, n_windows)
            total = part if total is None else total + part
            done += size
        if done == length:
            assert total is not None
            return total
        x = x[..., :-size, :] + x[..., size:, :]
        size *= 2


def outside_sums(x: Tensor, length: int) -> Tensor:
    """Sum of everything outside each window of ``length`` entries along dimension −2: left sum + right sum."""
    n_windows = x.shape[-2] - length + 1
    outside = x.new_zeros(*x.shape[:-2], n_windows, x.shape[-1])
    outside[..., 1:, :] = x[..., : n_windows - 1, :].cumsum(-2)
    outside[..., :-1, :] += x[..., length:, :].flip(-2).cumsum(-2).flip(-2)
    return outside

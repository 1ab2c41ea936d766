"""What an arm answered, read off the logits of its teacher-forced rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprobe.errors import TheoryError, quote


def answer_logprobs(logits: Tensor, ids: Sequence[int] | Tensor) -> Tensor:
    """ln p of each token of an answer [k], from the k rows of logits that predict it; fp32, in nats."""
    target = _target(logits, ids)
    return logits.float().log_softmax(-1).gather(-1, target[:, None])[:, 0]


def answer_match(logits: Tensor, ids: Sequence[int] | Tensor) -> Tensor:
    """Whether each token of an answer is its row's argmax, bool [k], from the k rows of logits that predict it.

    ``answer_match(…).all()`` says whether greedy decoding would write exactly this answer: as long as all tokens before
    it match, a row that was teacher-forced has seen what decoding would have seen. A tie goes to the smallest id.
    """
    return logits.argmax(-1) == _target(logits, ids)


def argmax_flips(clean: Tensor, ablated: Tensor) -> Tensor:
    """Whether the most probable token changed, bool [rows], from two sets of logits [rows, vocab]."""
    _check_alike(clean, ablated)
    return clean.argmax(-1) != ablated.to(clean.device).argmax(-1)


def kl_divergence(clean: Tensor, ablated: Tensor) -> Tensor:
    """KL(clean ‖ ablated) [rows] in nats, from two sets of logits [rows, vocab]; fp32."""
    _check_alike(clean, ablated)
    p, q = clean.float().log_softmax(-1), ablated.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def _target(logits: Tensor, ids: Sequence[int] | Tensor) -> Tensor:
    """The answer's ids [k] beside their rows of logits [k, vocab], or what does not fit."""
    target = torch.as_tensor(ids, device=logits.device)
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise TheoryError(f"{target.numel()} answer tokens for logits {list(logits.shape)}; allowed: one row a token")
    if len(target) and not 0 <= int(target.min()) <= int(target.max()) < logits.shape[1]:
        raise TheoryError(f"answer tokens {quote(target.tolist())}; allowed: 0 … {logits.shape[1] - 1}")
    return target


def _check_alike(clean: Tensor, ablated: Tensor) -> None:
    if clean.shape != ablated.shape:
        raise TheoryError(f"logits {list(clean.shape)} and {list(ablated.shape)}; allowed: two of one shape")

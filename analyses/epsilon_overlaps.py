"""What two values of ε have in common: tokens that lead, entries that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from kvprobe.sinks import Scores


def leading(scores: Scores, epsilon: float, share: float) -> dict[str, float]:
    """Part of the leading tokens by (s + ε) m that also lead at ε = 0: heads pooled, and within heads (mean)."""
    import numpy as np

    found = {}
    for name, pool in (("top_pooled", "all"), ("top_heads", "head")):
        mine, base = (np.atleast_2d(scores.pooled("value_mass", pool, epsilon=at)) for at in (epsilon, 0.0))
        rows = [(a, b) for a, b in zip(*(x.reshape(-1, x.shape[-1]) for x in (mine, base)), strict=True)]
        found[name] = float(np.mean([_shared(a, b, share) for a, b in rows if not np.isnan(b).all()]))
    return found


def _shared(mine: Any, base: Any, share: float) -> float:
    """Shared part of the ⌈share · n⌉ largest of both; of equals the first lead."""
    import numpy as np

    seen = np.flatnonzero(~np.isnan(base))
    k = int(np.ceil(share * len(seen)))
    first, second = ({*seen[np.argsort(-x[seen], kind="stable")[:k]].tolist()} for x in (mine, base))
    return len(first & second) / k


def overlap(mine: Tensor, reference: Tensor, stage1: Tensor, evidence: Sequence[int]) -> dict[str, float]:
    """Part of the kept entries [L, J, n] that the reference keeps, too: of all, and of those behind the first stage."""
    both, later = mine & reference, reference & ~stage1
    second = int(later.sum())
    return {
        "kept": float(both.sum() / reference.sum()),
        "kept_second": float((both & ~stage1).sum() / second) if second else float("nan"),
        "evidence_kept": float(mine[..., list(evidence)].double().mean()),
    }

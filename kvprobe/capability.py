"""What a capability check found, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

DIFFERENCES = (
    "logits_max_diff",
    "twin_max_diff",
    "cached_max_diff",
    "mask_max_diff",
    "pattern_max_diff",
    "row_sum_max_error",
    "output_max_diff",
)
"""What a check measures; their meaning is told by :class:`Report`."""


@dataclass(frozen=True)
class LayerReport:
    """One layer: its attention class, whether a score edit bit (None: not tried), and what shapes its softmax."""

    index: int
    kind: str
    maskable: bool | None
    window: int | None
    softcap: float | None
    sink: bool


@dataclass(frozen=True)
class Report:
    """Largest absolute differences in logits unless said otherwise.

    In half precision a mixture of experts is judged by its typical row (the median of the rows' largest differences):
    rounding flips a token's experts, and with them all its numbers.

    ``logits_max_diff`` bridge − transformers; ``twin_max_diff`` twin − transformers; ``cached_max_diff`` a cached run −
    an uncached one (the larger of twin and bridge); ``mask_max_diff`` the fast path under a mask − hooks;
    ``pattern_max_diff`` attention rows of twin − bridge; ``row_sum_max_error`` |Σ − 1|, learned sink counted;
    ``output_max_diff`` z W_O (+ bias) − the attention module's own output.
    """

    ok: bool
    model: str
    architecture: str
    attention: str
    layers: tuple[LayerReport, ...]
    logits_max_diff: float
    twin_max_diff: float
    cached_max_diff: float
    mask_max_diff: float
    pattern_max_diff: float
    row_sum_max_error: float
    output_max_diff: float
    tolerance: float
    shared_parameters: int
    processing: str
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"layers": [asdict(layer) for layer in self.layers], "versions": dict(self.versions)}


def refusal(model: str, error: Exception, versions: Mapping[str, str]) -> dict[str, Any]:
    """A refused model as the same plain values: what was not measured is None, layers that were not seen are missing.

    Parameters
    ----------
    model
        As it was asked for.
    error
        Whose ``facts``, where it has any, are what the check found until then.
    versions
        Of what is installed.
    """
    nothing: dict[str, Any] = {"architecture": None, "layers": [], "processing": None, "tolerance": None}
    nothing |= dict.fromkeys(DIFFERENCES)
    found = {name: value for name, value in getattr(error, "facts", {}).items() if name in nothing}
    return {"ok": False, "model": model, "error": str(error), **nothing, **found, "versions": dict(versions)}

"""What a capability check found, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LayerReport:
    """One layer: its attention class, whether a score edit bit, and what shapes its softmax."""

    index: int
    kind: str
    maskable: bool
    window: int | None
    softcap: float | None
    sink: bool


@dataclass(frozen=True)
class Report:
    """Largest absolute differences in logits unless said otherwise.

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

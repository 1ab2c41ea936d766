"""What CriticalKV (Feng et al., arXiv 2502.03805v2) reports, to be printed beside what is measured here.

Nothing is computed from these numbers. They are of other models, documents and lengths; each carries where it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PAPER = "CriticalKV, arXiv 2502.03805v2"

HEADS_REDUCED: dict[str, Any] = {
    "source": f"{PAPER}, Fig. 4",
    "setting": "MultiNews, 200 samples, 20 % cache, first decoded token",
    "share": {"Llama-3.1-8B-Instruct": 0.92, "Mistral-7B-Instruct-v0.3": 0.86},
}
"""Share of heads whose mean perturbation falls under Algorithm 1."""

BOUNDS: dict[str, Any] = {
    "source": f"{PAPER}, Table 9",
    "setting": "Llama-3.1-8B-Instruct, MultiNews, within a single attention layer",
    "rows": [
        {"cache": 0.2, "actual": 0.70, "bound": 3.21, "previous_bound": 4.65, "ratio": 0.690},
        {"cache": 0.4, "actual": 0.28, "bound": 1.43, "previous_bound": 2.64, "ratio": 0.542},
    ],
}
"""Actual perturbation, its bound, and the bound of attention-only selection."""

ASSUMPTION: dict[str, Any] = {
    "source": f"{PAPER}, Fig. 8",
    "setting": "share of heads whose best half budget holds more than half of the attention",
    "rows": [
        {"model": "Llama-3.1-8B-Instruct", "cache": 0.1, "share": 0.9990},
        {"model": "Llama-3.1-8B-Instruct", "cache": 0.2, "share": 1.0000},
        {"model": "Mistral-7B-Instruct-v0.3", "cache": 0.1, "share": 0.9932},
        {"model": "Mistral-7B-Instruct-v0.3", "cache": 0.2, "share": 0.9971},
    ],
}
"""Assumption 3.4."""


def applies(presets: Sequence[str], probe: str, norm: int) -> bool:
    """Whether a run is of the paper's kind: its poolings, the first decoded token, the L1 norm."""
    return set(presets) <= {"paper", "released"} and probe == "first_decoded" and norm == 1


def heads_reduced(policies: tuple[str, str], presets: Sequence[str], cache: float, probe: str, norm: int) -> Any:
    """:data:`HEADS_REDUCED` beside a map that compares what it compares, else None."""
    bases = ("snapkv", "snapkv+adakv")
    alike = policies in [(base, f"{base}+two_stage") for base in bases] and cache == 0.2
    return HEADS_REDUCED if alike and applies(presets, probe, norm) else None


def audited(presets: Sequence[str], probe: str, norm: int) -> Any:
    """:data:`BOUNDS` and :data:`ASSUMPTION` beside an audit of the paper's kind, else None."""
    return {"bounds": BOUNDS, "assumption": ASSUMPTION} if applies(presets, probe, norm) else None


def in_words(fact: dict[str, Any]) -> str:
    """Where a number stands, and what it is of."""
    return f"{fact['source']} ({fact['setting']})"

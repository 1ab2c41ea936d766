"""Causal probes of the KV cache: mask any keys of any head, and check what the theory says it does to the output.

The names below are the front door. Each is imported when it is first used, so that ``import kvprobe`` and
``kvprobe --help`` cost nothing that they do not need.

>>> import kvprobe as kp
>>> model = kp.load("smollm2-135m")  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "load": "models",
    "Model": "models",
    "Prompt": "prompts",
    "prefill": "runs",
    "observe": "runs",
    "intervene": "runs",
    "Trace": "traces",
    "KVMask": "interventions",
    "ValueGate": "interventions",
    "KVPatch": "interventions",
    "ResidualAblation": "interventions",
    "Inject": "interventions",
    "span_stats": "spans",
    "audit": "audits",
    "KVProbeError": "errors",
}
_MODULES = ("eviction", "maps", "placebo", "tasks")
_REACHABLE = (
    *(
        "audits",
        "cells",
        "heads",
        "interventions",
        "outcomes",
        "plan",
        "plots",
        "records",
        "sinks",
        "spans",
        "stats",
        "theory",
    ),
)
"""Not at the front door, but ``kvprobe.records`` works as the others do."""

__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in (*_MODULES, *_REACHABLE):
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

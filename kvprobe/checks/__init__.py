"""The capability check: is what this model computes what transformers computes, and does a mask bite on every layer?

It runs once, at load, on a short random prompt: a few forward passes. What it finds is kept in ``model.report`` and
printed by ``kvprobe check``. A check that fails is a :class:`~kvprobe.errors.CapabilityError`, never a warning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvprobe.capability import Report
from kvprobe.checks.check import Check
from kvprobe.errors import CapabilityError, ModelError
from kvprobe.versions import versions

__all__ = ["probe_ids", "reference_logits", "run"]


def probe_ids(hf: Any) -> Tensor:
    """A short fixed-seed prompt [1, n], longer than a small sliding window so that the window is exercised."""
    config = hf.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    length = 16 if not window or window > 64 else int(window) + 12
    generator = torch.Generator().manual_seed(0)
    device = next(iter(hf.parameters())).device
    return torch.randint(0, config.vocab_size, (1, length), generator=generator).to(device)


def reference_logits(hf: Any, ids: Tensor, label: str = "the model") -> Tensor:
    """transformers' own eager logits [n, vocab], taken before TransformerLens wraps the modules.

    Raises
    ------
    CapabilityError
        transformers itself cannot run the model.
    """
    try:
        with torch.no_grad():
            return hf(input_ids=ids, use_cache=False).logits[0].float()
    except Exception as error:  # code of any class raises what it likes; the user needs one line
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        have = ", ".join(f"{name} {version}" for name, version in versions().items())
        raise CapabilityError(
            f"{label} ({type(hf).__name__}): transformers itself cannot run it ({reason}); allowed: a model, a dtype "
            f"and a device on which it runs [{have}]",
            {"architecture": type(hf).__name__},
        ) from error


def run(label: str, twin: Any, bridge: Any, ids: Tensor, reference: Tensor) -> tuple[dict[str, Any], Report]:
    """All checks, cheapest first; returns the geometry as a mapping and the report.

    Raises
    ------
    CapabilityError
        Naming model, class, layer where there is one, versions, and a way out; with what was found until then.
    """
    check = Check(label, twin, bridge, ids, reference)
    try:
        return _run(check)
    except CapabilityError:
        raise
    except ModelError as error:
        raise check.refuse(str(error)) from error
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise check.refuse(
            f"kvprobe or TransformerLens' bridge cannot run its attention ({reason}); allowed: classes with plain "
            "multi-head, grouped-query or multi-query attention"
        ) from error


def _run(check: Check) -> tuple[dict[str, Any], Report]:
    observed, cache, outputs = check.observe()
    geometry = check.geometry(observed, cache)
    check.windows(geometry["windows"])
    check.logits()
    check.projection(observed, outputs, geometry["n_heads"])
    check.cached()
    check.masked(geometry)
    check.rows(observed, cache)
    shared = check.shared()
    plain = all(spec.plain for spec in observed.specs.values())
    report = Report(
        ok=True,
        model=check.model,
        architecture=check.architecture,
        attention="sdpa" if plain else "exact, in chunks of queries (window, soft-cap or learned sink)",
        layers=tuple(check.layers),
        tolerance=check.tolerance,
        shared_parameters=shared,
        processing=check.processing,
        versions=versions(),
        **check.found,
    )
    return geometry, report

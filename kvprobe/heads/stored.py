"""The first-layer rule's decision as a file: written by one run, read by later ones, never of another model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe.errors import DataError, KVProbeError, quote
from kvprobe.heads.rule import MEASURES, SCHEMA, Rule, content, decide, named
from kvprobe.records import write_json


def write_rule(path: str | PathLike[str], report: Mapping[str, Any], model: Any, **facts: Any) -> Path:
    """Write a decision as JSON, for ``--exclude-layers``.

    Parameters
    ----------
    report
        What :func:`kvprobe.heads.decide` returned.
    model
        The model that was measured, or its name.
    facts
        Anything else worth keeping (task, seeds, …).

    Raises
    ------
    RecordError
        ``path`` does not end in ``.json``, or cannot be written.
    """
    return write_json(content(report, model, **facts), Path(path))


def read_rule(path: str | PathLike[str], model: Any = None) -> dict[str, Any]:
    """Read a decision that :func:`write_rule` wrote.

    Parameters
    ----------
    model
        The model that it must belong to, or its name as ``load`` takes it; None asks nothing.

    Returns
    -------
    dict
        What the file says, its ``excluded`` layers held against its own numbers and rule; and ``file``, ``sha256``.

    Raises
    ------
    DataError
        No such file, no stored rule, numbers that do not give its decision, or the decision of another model.
    """
    raw = _bytes(path)
    said = _parsed(path, raw)
    if model is not None and said["model"] != named(model):
        raise DataError(f"{path} is a rule of {quote(said['model'])}; allowed: one of {named(model)!r}")
    return said | {"file": str(path), "sha256": hashlib.sha256(raw).hexdigest()}


def origin(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What a run that obeys a stored rule keeps of it."""
    return {name: stored[name] for name in ("file", "sha256", "model", "excluded", "rule", "rule_text", "n_items")}


def _bytes(path: str | PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def _parsed(path: str | PathLike[str], raw: bytes) -> dict[str, Any]:
    """The file as a dict whose decision follows from its own numbers."""
    try:
        said = json.loads(raw.decode("utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(said, dict) or said.get("schema") != SCHEMA:
        raise DataError(f"{path} is no stored layer rule; allowed: a file that kvprobe heads wrote ({SCHEMA})")
    missing = [name for name in ("model", "excluded", "rule", "rule_text", "n_items", *MEASURES) if name not in said]
    if missing:
        raise DataError(f"{path} is an incomplete layer rule: it lacks {missing[0]}")
    try:
        # JSON has no NaN: a head that never saw two keys has no relative entropy, and is stored as null.
        again = decide([{name: _table(said[name]) for name in MEASURES}], Rule(**said["rule"]))
    except (TypeError, ValueError, KVProbeError) as error:
        raise DataError(f"{path} is no layer rule: {' '.join(str(error).split())}") from None
    if said["excluded"] != again["excluded"]:
        raise DataError(
            f"{path} says excluded {quote(said['excluded'])}, its own numbers and rule give {again['excluded']}"
        )
    return said


def _table(values: Any) -> Any:
    return np.array(values, dtype=np.float64)

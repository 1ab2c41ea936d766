"""Head profiles: importance per query head as JSON, and gates per kv head as TSV."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from kvprobe.errors import DataError, EvictionError, quote
from kvprobe.records import write_json, write_text

Rows = tuple[tuple[float, ...], ...]
REQUIRED = ("model", "kind", "n_layers", "n_heads", "scores")


@dataclass(frozen=True)
class HeadProfile:
    """What a scan of heads has found: one score a query head.

    Attributes
    ----------
    model
        Name of the model that was scanned.
    kind
        What the scores say: ``"retrieval"``, ``"reasoning"``, …
    scores
        [L, H] finite numbers; nested sequences or a tensor, stored as tuples.
    facts
        Anything else worth keeping (seed, trials, …), stored beside them.
    """

    model: str
    kind: str
    scores: Rows
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "kind"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise EvictionError(f"{name}={quote(value)}; allowed: text")
        if taken := sorted(set(self.facts) & set(REQUIRED)):
            raise EvictionError(f"facts name {quote(taken[0])}; allowed: names other than {', '.join(REQUIRED)}")
        object.__setattr__(self, "scores", rows(self.scores, "scores"))

    @property
    def n_layers(self) -> int:
        """Number of layers L."""
        return len(self.scores)

    @property
    def n_heads(self) -> int:
        """Query heads a layer, H."""
        return len(self.scores[0])

    def to_dict(self) -> dict[str, Any]:
        """What a profile's file holds."""
        return {name: getattr(self, name) for name in REQUIRED} | dict(self.facts)

    def gates(self) -> Rows:
        """DuoAttention's gates of query heads [L, H] in [0, 1]: scores over the largest score of the model.

        Raises
        ------
        EvictionError
            A negative score, or none above 0.
        """
        if (least := min(map(min, self.scores))) < 0:
            raise EvictionError(f"the profile of {self.model} holds the score {least}; allowed: numbers ≥ 0")
        if not (largest := max(map(max, self.scores))):
            raise EvictionError(f"every head of {self.model} has the score 0; allowed: at least one score > 0")
        return tuple(tuple(each / largest for each in row) for row in self.scores)

    def check_model(self, name: str, source: str | PathLike[str]) -> None:
        """Refuse a profile (read from ``source``) of another model than ``name``; folders before it do not count.

        Raises
        ------
        DataError
            It names another model.
        """
        if self.model.rsplit("/", 1)[-1] != name.rsplit("/", 1)[-1]:
            raise DataError(f"{source} is a profile of {self.model!r}; allowed: one of {name!r}")


def write_profile(profile: HeadProfile, path: str | PathLike[str]) -> Path:
    """Write a profile as JSON.

    Raises
    ------
    RecordError
        ``path`` does not end in ``.json``, or cannot be written.
    """
    return write_json(profile.to_dict(), Path(path))


def read_profile(path: str | PathLike[str], model: str | None = None) -> HeadProfile:
    """Read a profile that :func:`write_profile` wrote.

    Parameters
    ----------
    path
        A JSON file: ``model``, ``kind``, ``n_layers``, ``n_heads``, ``scores`` [L, H], and any other facts.
    model
        The model that it must belong to, by the last part of its name; None asks nothing.

    Raises
    ------
    DataError
        No such file, no profile, numbers that do not fit or are not finite, or the profile of another model.
    """
    content = _object(path)
    if missing := [name for name in REQUIRED if name not in content]:
        raise DataError(f"{path} is no head profile: it lacks {missing[0]}; allowed: {', '.join(REQUIRED)}")
    try:
        profile = HeadProfile(content["model"], content["kind"], content["scores"], _others(content))
    except EvictionError as error:
        raise DataError(f"{path}: {error}") from None
    said, found = [content["n_layers"], content["n_heads"]], [profile.n_layers, profile.n_heads]
    if said != found:
        raise DataError(f"{path} says n_layers, n_heads = {quote(said)}, and its scores have shape {found}")
    if model is not None:
        profile.check_model(model, path)
    return profile


def read_gates(path: str | PathLike[str]) -> Rows:
    """Read gates [L, K]: one line a layer, values between tabs or spaces.

    Raises
    ------
    DataError
        No such file, or no table of finite numbers.
    """
    lines = [line.split() for line in _text(path).splitlines() if line.strip()]
    try:
        return rows([[float(value) for value in line] for line in lines], "gates")
    except (ValueError, EvictionError) as error:
        raise DataError(f"{path} is no table of layers × kv heads: {error}") from None


def write_gates(path: str | PathLike[str], gates: Any) -> Path:
    """Write gates [L, K] as :func:`read_gates` reads them: one line a layer, tabs between numbers, none rounded.

    Raises
    ------
    EvictionError
        No table of finite numbers.
    RecordError
        ``path`` does not end in ``.tsv``, or cannot be written.
    """
    lines = ["\t".join(map(repr, row)) for row in rows(gates, "gates")]
    return write_text("\n".join(lines) + "\n", Path(path), ".tsv")


def rows(values: Any, name: str) -> Rows:
    """A table of finite numbers as nested tuples, from nested sequences or a tensor, or :class:`EvictionError`."""
    table = values.detach().cpu().double().tolist() if isinstance(values, Tensor) else values
    try:
        result = tuple(tuple(float(each) for each in row) for row in table)
    except (TypeError, ValueError, OverflowError):
        raise EvictionError(f"{name}={quote(values)}; allowed: a table of numbers, layers × heads") from None
    widths = sorted({len(row) for row in result})
    if len(widths) != 1 or widths[0] == 0:
        raise EvictionError(f"{name} has rows of {quote(widths)} numbers; allowed: one length ≥ 1 for every layer")
    if any(isinstance(each, bool) for row in table for each in row):
        raise EvictionError(f"{name}={quote(values)}; allowed: a table of numbers, not of true and false")
    if bad := [(i, j) for i, row in enumerate(result) for j, each in enumerate(row) if not math.isfinite(each)]:
        layer, head = bad[0]
        raise EvictionError(f"{name} is {result[layer][head]} at layer {layer}, head {head}; allowed: finite numbers")
    return result


def _object(path: str | PathLike[str]) -> dict[str, Any]:
    try:
        content = json.loads(_text(path))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is no head profile: {quote(content)}; allowed: an object with {', '.join(REQUIRED)}")
    return content


def _others(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name not in REQUIRED}


def _text(path: str | PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text file") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None

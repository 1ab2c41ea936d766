"""Errors that name what was given and what is allowed.

Every mistake that a user can make raises a :class:`KVProbeError` subclass with a one-line message; the command line
prints that line and exits 2. Broken invariants of our own raise ``AssertionError``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def quote(value: object, limit: int = 80) -> str:
    """A value as a message shows it: its repr, on one line, shortened."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


class KVProbeError(Exception):
    """Base class of every error that kvprobe raises about its input."""


class ModelError(KVProbeError):
    """A model that cannot be found, loaded, or intervened on."""


class CapabilityError(ModelError):
    """A model that loads, but on which an intervention would not do what it says.

    ``facts`` is what was found before it was refused, by the names of :class:`kvprobe.capability.Report`.
    """

    def __init__(self, message: str, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.facts = dict(facts or {})


class PromptError(KVProbeError):
    """Text, token ids or spans that do not fit together."""


class InterventionError(KVProbeError):
    """A mask (or other intervention) that cannot be applied as asked."""


class PlanError(KVProbeError):
    """A run that does not fit the memory at hand, or an amount of memory that is none."""


class EvictionError(KVProbeError):
    """A policy that makes no sense, or a cache that it cannot be applied to."""


class ReceiptError(KVProbeError):
    """An intervention ran, but its receipt does not hold: the result must not be used."""


class TaskError(KVProbeError):
    """An unknown task, or settings from which no item can be built."""


class TheoryError(KVProbeError):
    """Tensors outside the domain of a formula."""


class StatisticsError(KVProbeError):
    """A table that a statistic is not defined on."""


class DataError(KVProbeError):
    """A file or download that is missing, corrupt or not of the expected form."""


class RecordError(KVProbeError):
    """An output folder or file that cannot be written."""

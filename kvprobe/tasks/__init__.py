"""Benchmark tasks by name.

A family is a module of this package with ``TASKS`` (a mapping or sequence of names) and
``make(name, model, *, length, seed, **options)``; registering it is one more name in :data:`FAMILIES`. Families whose
items are reasoning traces (no question, no answer) stand in :data:`TRACES` and are made by :func:`trace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from kvprobe.errors import TaskError
from kvprobe.tasks import scoring
from kvprobe.tasks.document import Document, documents
from kvprobe.tasks.items import Item
from kvprobe.tasks.traces import TraceItem

__all__ = [
    "FAMILIES",
    "TRACES",
    "Document",
    "Item",
    "TraceItem",
    "documents",
    "make",
    "names",
    "scoring",
    "trace",
    "trace_names",
]

FAMILIES = ("niah",)
TRACES = ("trace_memory",)


def _families(families: Sequence[str]) -> dict[str, ModuleType]:
    """Task name → the module that makes it."""
    modules = [import_module(f"{__name__}.{family}") for family in families]
    return {name: module for module in modules for name in module.TASKS}


def names() -> list[str]:
    """Names of all tasks."""
    return list(_families(FAMILIES))


def make(name: str, model: Any, *, length: int, seed: int, **options: Any) -> Item:
    """Generate one item of a task.

    Parameters
    ----------
    name
        One of :func:`names`.
    model
        A loaded model (its ``tokenizer`` and ``max_length`` are used).
    length
        Tokens of prompt and generation together.
    seed
        Any whole number; the same task, seed, length and options give the same item.
    **options
        Options of the family, for the needle tasks :class:`kvprobe.tasks.options.Options`.

    Raises
    ------
    TaskError
        For an unknown task (naming those there are), and whatever the family refuses.

    Examples
    --------
    >>> item = make("niah_single_2", model, length=1500, seed=0)    # doctest: +SKIP
    >>> start, stop = item.spans["evidence"][0]                     # doctest: +SKIP
    """
    found = _families(FAMILIES)
    if name not in found:
        raise TaskError(f"no task {name!r}, must be one of {', '.join(found)}")
    return found[name].make(name, model, length=length, seed=seed, **options)


def trace_names() -> list[str]:
    """Names of all trace tasks."""
    return list(_families(TRACES))


def trace(name: str, model: Any, *, seed: int, **options: Any) -> TraceItem:
    """Generate one reasoning trace in which a quantity is derived once and mentioned again.

    Parameters
    ----------
    name
        One of :func:`trace_names`.
    model
        A loaded model (its ``tokenizer`` and ``max_length`` are used).
    seed
        Any whole number; the same task, seed and options give the same trace.
    **options
        ``length`` (the most tokens), and options of the family: :class:`kvprobe.tasks.trace_memory.Options`.

    Raises
    ------
    TaskError
        For an unknown task (naming those there are), and whatever the family refuses.

    Examples
    --------
    >>> item = trace("trace_memory", model, seed=0, mentions=5)    # doctest: +SKIP
    >>> [mention.k for mention in item.mentions]                   # doctest: +SKIP
    [1, 2, 3, 4, 5]
    """
    found = _families(TRACES)
    if name not in found:
        raise TaskError(f"no trace task {name!r}, must be one of {', '.join(found)}")
    return found[name].make(name, model, seed=seed, **options)

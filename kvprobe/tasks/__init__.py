"""Benchmark tasks by name.

A family is a module of this package with ``TASKS`` (a mapping or sequence of names) and
``make(name, model, *, length, seed, **options)``; registering it is one more name in :data:`FAMILIES`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from kvprobe.errors import TaskError
from kvprobe.tasks import scoring
from kvprobe.tasks.document import Document, documents
from kvprobe.tasks.items import Item

__all__ = ["FAMILIES", "Document", "Item", "documents", "make", "names", "scoring"]

FAMILIES = ("niah",)


def _families() -> dict[str, ModuleType]:
    """Task name → the module that makes it."""
    modules = [import_module(f"{__name__}.{family}") for family in FAMILIES]
    return {name: module for module in modules for name in module.TASKS}


def names() -> list[str]:
    """Names of all tasks."""
    return list(_families())


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
    found = _families()
    if name not in found:
        raise TaskError(f"no task {name!r}, must be one of {', '.join(found)}")
    return found[name].make(name, model, length=length, seed=seed, **options)

"""All that decides what a run computes: a run goes on from another's parts only where this is the same."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kvprobe.parts import mark
from kvprobe.records.writing import to_json
from kvprobe.versions import versions

SAYING = ("json", "out", "debug")
"""Arguments that change where and how results are told, not what they are."""


def asked(
    command: str, arguments: Mapping[str, Any], seed: int | None, model: str | None, identity: Mapping[str, Any]
) -> dict[str, Any]:
    """Command, arguments, the files that they name, seed, model, libraries and our own code, as plain values."""
    chosen = {name: value for name, value in arguments.items() if name not in SAYING}
    return {
        "command": command,
        "arguments": _plain(chosen),
        "inputs": {name: found for name, value in sorted(chosen.items()) if (found := _named_file(value))},
        "seed": seed,
        "model": {"name": model} | _plain(identity),
        "versions": versions(),
        "code": _code(),
        "platform": [platform.system(), platform.machine()],
    }


def weights(name: str) -> str | None:
    """A mark of a model's folder; None for a name, whose revision tells which weights they are."""
    folder = Path(name)
    return mark(folder) if folder.is_dir() else None


def _named_file(value: Any) -> str | None:
    """A mark of the file or folder that an argument names, if it does."""
    try:
        path = Path(value) if isinstance(value, (str, Path)) and str(value).strip() else None
        return None if path is None or not path.exists() else mark(path)
    except (OSError, ValueError):  # a text that no file system takes for a name
        return None


@cache
def _code() -> str:
    """Of kvprobe's own modules: a version is not changed at every edit."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root).as_posix()}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _plain(value: Any) -> Any:
    return json.loads(to_json(value))

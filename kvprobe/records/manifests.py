"""Reading a run folder's manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
SCHEMA = "kvprobe-run/1"


def manifest_of(path: Path) -> dict[str, Any] | None:
    """The manifest in a folder; None if there is none, or one of something else."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(manifest, dict) and str(manifest.get("schema", "")).startswith("kvprobe-run/")
    return manifest if ours else None


def own_files(manifest: Mapping[str, Any]) -> set[str]:
    """The names that an earlier run wrote; one that leads out of the folder is not ours to remove."""
    names = [*manifest.get("outputs", []), *manifest.get("earlier_outputs", [])]
    return {name for name in names if not Path(name).is_absolute() and ".." not in Path(name).parts}

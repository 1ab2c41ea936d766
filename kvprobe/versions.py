"""Versions of what is installed, read from package metadata: nothing is imported to learn them."""

from __future__ import annotations

import platform
from importlib import metadata

RECORDED = ("kvprobe", "torch", "transformers", "transformer-lens", "numpy", "pandas", "scipy", "safetensors", "gguf")
"""The distributions whose versions a manifest names."""


def versions(*names: str) -> dict[str, str]:
    """Return the version of Python and of each distribution, ``"absent"`` for one that is not installed.

    Parameters
    ----------
    *names
        Distribution names as pip spells them; without any, those in :data:`RECORDED`.
    """
    return {"python": platform.python_version()} | {name: _version(name) for name in names or RECORDED}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"

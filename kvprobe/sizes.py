"""How much memory there is, how it is written, and the limits under which a run keeps to it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvprobe.errors import PlanError, quote

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)
_CGROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Limits:
    """What a run may hold at once; None for what is fastest where memory does not matter.

    Attributes
    ----------
    chunk
        Tokens of one prefill pass.
    batch
        Arms of one pass.
    logits_bytes
        Bytes of attention logits.
    """

    chunk: int | None = None
    batch: int | None = None
    logits_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("chunk", "batch", "logits_bytes"):
            value = getattr(self, name)
            if value is not None and (not hasattr(value, "__index__") or isinstance(value, bool) or value < 1):
                raise PlanError(f"{name}={quote(value)} is not allowed: give None, or a whole number of 1 or more")


UNLIMITED = Limits()


def at_hand(device: torch.device) -> int:
    """Bytes that this process may hold in all on ``device``: what it holds already and what is still free.

    On a CUDA device what the driver says, on Linux ``MemAvailable`` and the control group's limit, elsewhere all
    physical memory.
    """
    if device.type == "cuda":
        try:
            free, _ = torch.cuda.mem_get_info(device)
        except (AssertionError, RuntimeError) as error:  # torch asserts that it was compiled for the device
            raise PlanError(
                f"the memory of {device} cannot be read here ({' '.join(str(error).split())[:120]}); allowed: say how "
                "much there is (memory, or --memory)"
            ) from error
        return int(free + torch.cuda.memory_allocated(device))
    return held() + min([_available(), *_allowed()])


def held() -> int:
    """Bytes of this process' resident memory (0 where the system does not tell)."""
    return _lines("/proc/self/status").get("VmRSS", 0)


def _available() -> int:
    found = _lines("/proc/meminfo").get("MemAvailable")
    return found if found is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _allowed() -> list[int]:
    """What the control group leaves, where it sets a limit."""
    left = []
    for limit, used in _CGROUPS:
        with suppress(OSError, ValueError):  # "max", or no such file: no limit
            root = Path("/sys/fs/cgroup")
            left.append(max(0, int((root / limit).read_text()) - int((root / used).read_text())))
    return left


def _lines(path: str) -> dict[str, int]:
    """``Name: 123 kB`` lines as bytes."""
    found = {}
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                found[name] = int(value.split()[0]) << 10
    return found


def as_bytes(text: Any) -> int:
    """``6GiB``, ``512 MB`` (powers of 1024 alike) or a number of bytes as a whole number of bytes."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    size = int(float(match[1]) * UNITS[match[2].lower()]) if match else 0
    if size < 1:
        raise PlanError(f"memory={quote(text)} is not an amount; allowed: 6GiB, 512MiB, or a number of bytes")
    return size


def written(n: float) -> str:
    """``1.71 GiB``, ``360 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} TiB"

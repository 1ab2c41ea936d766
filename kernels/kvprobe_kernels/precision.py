"""Products in the precision of their operands, whatever the process has allowed torch to do with float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

EXACT = ("ieee", "none", "highest")


@contextmanager
def exact_products(device: str) -> Iterator[None]:
    """No TF32, no bfloat16 pieces, no autocast on ``device`` (its type); the process's choice is put back after.

    ``torch.set_float32_matmul_precision("medium")`` makes float32 products wrong in the third digit, on CPUs too. The
    setting belongs to the process: another thread that multiplies meanwhile gets exact products as well.
    """
    get, put, exact = _setting(device)
    allowed = get()
    with torch.autocast(device, enabled=False):
        try:
            if allowed not in EXACT:
                put(exact)
            yield
        finally:
            if allowed not in EXACT:
                put(allowed)


def _setting(device: str) -> tuple[Callable[[], str], Callable[[str], None], str]:
    """How to read and write the setting.

    A backend's own where torch has it: the older, common one refuses to be read once a user has touched the newer.
    """
    backend: Any = {"cpu": torch.backends.mkldnn, "cuda": torch.backends.cuda}.get(device)
    matmul: Any = getattr(backend, "matmul", None)
    if hasattr(matmul, "fp32_precision"):
        return (lambda: matmul.fp32_precision), (lambda value: setattr(matmul, "fp32_precision", value)), "ieee"
    return torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"

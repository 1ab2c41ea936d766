"""Products in the precision of their operands, whatever the process has allowed torch to do with float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_products(device: str) -> Iterator[None]:
    """No TF32, no bfloat16 pieces, no autocast on ``device`` (its type); the process's choice is put back after.

    ``torch.set_float32_matmul_precision("medium")`` makes float32 products wrong in the third digit, on CPUs too.
    """
    precision = torch.get_float32_matmul_precision()
    with torch.autocast(device, enabled=False):
        try:
            if precision != "highest":
                torch.set_float32_matmul_precision("highest")
            yield
        finally:
            if precision != "highest":
                torch.set_float32_matmul_precision(precision)

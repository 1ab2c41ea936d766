"""Which function runs: an operation's backend, chosen by name and never silently exchanged for another."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

BACKENDS = ("reference", "torch", "triton")
_MODULES = {"reference": "reference", "torch": "torch_impl", "triton": "triton_impl"}


class KernelError(ValueError):
    """A kernel's argument is outside what it is defined on, or its backend cannot run here."""


def implementation(op: str, backend: str, device: torch.device | str) -> Callable[..., Any]:
    """The function of ``kvprobe_kernels.<op>`` that a backend runs.

    Parameters
    ----------
    op : str
        The operation: a folder of this package and the name of the function in each of its modules.
    backend : {"reference", "torch", "triton"}
        ``triton`` is imported here, and only when chosen.
    device : torch.device or str
        Where the tensors are. Triton needs CUDA; its interpreter (TRITON_INTERPRET=1 before triton is imported) takes
        tensors on the CPU as well.

    Returns
    -------
    callable
        The function, whose arguments the caller has checked.

    Raises
    ------
    KernelError
        No such backend, triton is missing, or it cannot run on that device.
    """
    if backend not in _MODULES:
        raise KernelError(f"backend={backend!r}: allowed are {', '.join(map(repr, BACKENDS))}")
    name = f"{__package__}.{op}.{_MODULES[backend]}"
    module = _triton(name, torch.device(device)) if backend == "triton" else import_module(name)
    function: Callable[..., Any] = getattr(module, op)
    return function


def _triton(name: str, device: torch.device) -> ModuleType:
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "triton":
            raise
        raise KernelError(
            "backend='triton': triton is not installed (pip install 'kvprobe[triton]'); "
            "backend='torch' runs on any device"
        ) from error
    if device.type != "cuda" and not _interpreted(module):
        raise KernelError(
            f"backend='triton': the tensors are on {device.type!r}, and Triton needs 'cuda' (or its interpreter, with "
            "TRITON_INTERPRET=1 set before triton is imported); backend='torch' runs on any device"
        )
    return module


def _interpreted(module: ModuleType) -> bool:
    # Asked of the kernels themselves: the variable is read when they are decorated, so its value now says nothing.
    from triton.runtime.interpreter import InterpretedFunction

    return any(isinstance(member, InterpretedFunction) for member in vars(module).values())

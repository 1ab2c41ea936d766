"""Arms that differ from some layer on share every layer below it: one row of a batch runs there instead of all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kvprobe import engine
from kvprobe.attention import serving


@contextmanager
def shared_below(twin: Any, n_layers: int, layer: int) -> Iterator[None]:
    """Inside, passes of a batch run the layers below ``layer`` on its first row alone, for all of them.

    Exact where the arms of a batch read the same tokens and touch nothing below ``layer``; then neither could differ
    there. So not while decoding (tokens that arms write by themselves are not the same), and without traces, which want
    every arm's own keys. Other threads' passes are left alone, and passes outside a run of ours, too.
    """
    layers = engine.attention_modules(twin, n_layers)
    names = {id(module): name for name, module in twin.named_modules()}
    first, here = (twin.get_submodule(names[id(layers[at])].rpartition(".")[0]) for at in (0, layer))
    width, thread = [1], threading.get_ident()

    def narrow(module: Any, args: Any, kwargs: Any) -> Any:
        if serving() is None or threading.get_ident() != thread:
            return None
        return _with(args, kwargs, lambda hidden: _one(hidden, width))

    def widen(module: Any, args: Any, kwargs: Any) -> Any:
        if serving() is None or threading.get_ident() != thread:
            return None
        return _with(args, kwargs, lambda hidden: hidden.expand(width[0], -1, -1).contiguous())

    hooked = ((first, narrow), (here, widen)) if layer else ()
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooked]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _one(hidden: Tensor, width: list[int]) -> Tensor:
    width[0] = hidden.shape[0]
    return hidden[:1]


def _with(args: Any, kwargs: Any, change: Any) -> Any:
    """A layer's arguments with its hidden states changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

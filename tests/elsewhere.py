"""A make-believe accelerator: tensors that say they are on another device and refuse to meet those of a third.

Their numbers lie in a plain CPU tensor. Every operation is checked as CUDA checks it: all tensors on one device, apart
from scalars of the CPU, indices from the CPU, and copies; NumPy reads nothing that was not brought back. The device is
called ``meta:0``, ``meta:1``, … because torch lets that name be carried without an accelerator.
"""

from __future__ import annotations

import re
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CPU = torch.device("cpu")
COPIES = ("aten::_to_copy", "aten::copy_")
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")


class MixedDevices(RuntimeError):
    """What CUDA raises as "Expected all tensors to be on the same device"."""


class There(Tensor):
    """A tensor that is on ``device``, by its own account."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner, device):
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )

    def __init__(self, inner, device):
        self.inner = inner

    def __repr__(self):
        return f"There({self.inner!r}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _checked(function, args, kwargs or {})


def device(name):
    """A device with its number: ``meta`` is ``meta:0``."""
    found = torch.device(name)
    return torch.device("meta", found.index or 0) if found.type == "meta" else found


def home(value):
    """The numbers of a tensor, wherever it says it is."""
    return value.inner if isinstance(value, There) else value


def _checked(function, args, kwargs):
    """Run one operation where its tensors are, or raise."""
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    name = function._schema.name
    assert all(isinstance(tensor, There) or tensor.device == CPU for tensor in tensors), f"{name} lost its numbers"
    free = {id(tensor) for tensor in tensors if tensor.dim() == 0 and tensor.device == CPU}
    if name in INDEXED:
        free |= {id(index) for index in args[1] if isinstance(index, Tensor) and index.device == CPU}
    found = {tensor.device for tensor in tensors if id(tensor) not in free}
    if len(found) > 1 and name not in COPIES:
        raise MixedDevices(f"{name} of {[(list(tensor.shape), str(tensor.device)) for tensor in tensors]}")
    asked = kwargs.get("device")
    where = device(asked) if asked is not None else args[0].device if name in COPIES else next(iter(found), CPU)
    plain_args, plain = tree_map(home, (args, kwargs))
    result = function(*plain_args, **plain | ({} if asked is None else {"device": CPU}))
    known = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, There)}

    def away(value):
        if not isinstance(value, Tensor) or where == CPU:
            return value
        return known[id(value)] if id(value) in known else There(value, where)

    return tree_map(away, result)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _checked(function, args, kwargs or {})


class _Constructors(TorchFunctionMode):
    """What torch does in C++ without asking any mode: numbers from Python, to Python, and lists as indices."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            where = device(kwargs.pop("device"))
            return function(*args, **kwargs).to(where)
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(torch.tensor(i) if isinstance(i, list) else i for i in index), *args[2:])
        if function is Tensor.tolist and isinstance(args[0], There):
            return args[0].inner.tolist()
        if function in (Tensor.numpy, Tensor.__array__) and isinstance(args[0], There):
            raise TypeError(f"cannot convert a tensor on {args[0].device} to NumPy: copy it to the CPU first")
        return function(*args, **kwargs)


@contextmanager
def strict():
    """Check every operation of this thread."""
    autocast = torch.autocast
    torch.autocast = lambda kind, **options: nullcontext() if kind == "meta" else autocast(kind, **options)
    try:
        with _Constructors(), _Operations():
            yield
    finally:
        torch.autocast = autocast


def moved(twin, n_devices=1):
    """Bring a model's weights to devices, layers in order over all of them, and its activations with accelerate's idea.

    As ``device_map`` does it: what enters a module is carried to where its weights are.
    """
    n_layers = twin.config.num_hidden_layers

    def where(path):
        layer = re.search(r"\b(?:layers|h)\.(\d+)", path)
        last = path.startswith(("model.norm", "lm_head", "transformer.ln_f"))
        at = int(layer[1]) * n_devices // n_layers if layer else n_devices - 1 if last else 0
        return device(f"meta:{at}")

    for path, module in twin.named_modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                table[name] = None if tensor is None else There(tensor.detach(), where(path))
        if re.fullmatch(r".*\b(?:layers|h)\.\d+", path) or module._parameters or module._buffers:
            module.register_forward_pre_hook(_carry(where(path)), with_kwargs=True)
    return twin


def _carry(where):
    def hook(module, args, kwargs):
        return tree_map(lambda value: value.to(where) if isinstance(value, Tensor) else value, (args, kwargs))

    return hook

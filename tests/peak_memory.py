"""How many bytes an operation's intermediate tensors take at their highest."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """``with Peak() as memory: ...``, then ``memory.peak``: the most bytes that results of operations hold at a time.

    Tensors made outside do not count, and neither does the scratch space inside one operation.
    """

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in given | self.known.keys():
                self._hold(tensor.untyped_storage())
        return out

    def _hold(self, storage):
        key, size = id(storage), storage.nbytes()
        self.known[key] = weakref.ref(storage, lambda _: self._free(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, key, size):
        del self.known[key]
        self.live -= size

"""What projected_norm refuses, and how it says so."""

import re

import pytest
import torch

from kvprobe_kernels import KernelError, projected_norm

V, W = torch.zeros(2, 5, 8), torch.zeros(4, 8, 33)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p": 3}, "p=3: allowed are 1 and 2"),
        ({"p": True}, "p=True: allowed are 1 and 2"),
        ({"group": "max"}, "group='max': allowed are 'mean', 'none'"),
        ({"V": V[0]}, "V is [5, 8]: it must be [*B, K, n, d] with K and d at least 1"),
        ({"V": V[:0]}, "V is [0, 5, 8]: it must be [*B, K, n, d]"),
        ({"W_O": W[0]}, "W_O is [8, 33]: it must be [H, d, D]"),
        ({"W_O": W[:, :, :0]}, "W_O is [4, 8, 0]: it must be [H, d, D] with each at least 1"),
        ({"W_O": W[:, :7]}, "V has head width d = 8 and W_O d = 7"),
        ({"W_O": W[:3]}, "W_O has H = 3 heads and V K = 2: H must be a multiple of K"),
        ({"V": V.long()}, "V is torch.int64: allowed are torch.float16"),
        ({"W_O": W.numpy()}, "W_O is a ndarray, a torch.Tensor is needed"),
        ({"V": None}, "V is a NoneType, a torch.Tensor is needed"),
        ({"W_O": W.to("meta")}, "W_O is on meta and V on cpu: one device is needed"),
        ({"centre": torch.zeros(4, 32)}, "centre is [4, 32]: it must be [*B, H, D] = [4, 33]"),
        ({"centre": torch.zeros(1, 4, 33)}, "centre is [1, 4, 33]: it must be [*B, H, D] = [4, 33]"),
        ({"W_O": W / 0, "p": 2}, "W_O holds NaN or infinity: p=2 factors it and needs finite numbers"),
        ({"W_O": W / 0, "p": 2, "centre": torch.zeros(4, 33)}, "W_O holds NaN or infinity: p=2 factors it"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(KernelError, match=re.escape(message)) as raised:
        projected_norm(**({"V": V, "W_O": W} | arguments))
    assert "\n" not in str(raised.value)

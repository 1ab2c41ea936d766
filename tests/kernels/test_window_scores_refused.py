"""What window_scores refuses: one line, with what was given and what is allowed."""

import math

import pytest
import torch

from kvprobe_kernels import KernelError, window_scores

Q0, K0 = torch.ones(2, 4, 5, 8), torch.ones(2, 2, 37, 8)
REFUSED = {
    "pool": (dict(pool="mean"), r"pool='mean': allowed are 'avg', 'max', 'none'"),
    "group": (dict(group="sum"), r"group='sum': allowed are 'mean', 'max', 'none'"),
    "even": (dict(kernel=4), r"kernel=4: allowed are odd integers from 1"),
    "zero": (dict(kernel=-1), r"kernel=-1: allowed are odd integers from 1"),
    "float": (dict(kernel=5.0), r"kernel=5.0: allowed are odd integers from 1"),
    "scale": (dict(scale=math.nan), r"scale=nan: allowed are finite numbers, or None"),
    "window": (dict(K=K0[..., :4, :]), r"the window has 5 queries for 4 keys: allowed are 1 to 4"),
    "heads": (dict(Q=Q0[:, :3]), r"Q has 3 heads and K has 2: allowed is a multiple of K's heads"),
    "d": (dict(K=K0[..., :7]), r"Q is \[2, 4, 5, 8\] and K is \[2, 2, 37, 7\]: allowed are .* the same d"),
    "batch": (dict(K=K0[0]), r"Q is \[2, 4, 5, 8\] and K is \[2, 37, 8\]: allowed are the same leading dimensions"),
    "flat": (dict(Q=Q0[0, 0]), r"Q is torch.float32 \[5, 8\]: allowed are floating-point \[\*B, H, w, d\]"),
    "empty": (dict(Q=Q0[..., :0, :]), r"Q is torch.float32 \[2, 4, 0, 8\]: .*none empty"),
    "integers": (dict(K=K0.long()), r"K is torch.int64 \[2, 2, 37, 8\]: allowed are floating-point"),
    "alive": (
        dict(alive=torch.ones(2, 4, 37).bool()),
        r"alive is torch.bool \[2, 4, 37\]: allowed is bool \[2, 2, 37\]",
    ),
    "alive type": (dict(alive=torch.ones(2, 2, 37)), r"alive is torch.float32 .*: allowed is bool \[2, 2, 37\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_was_given_and_what_is_allowed(backend, case):
    change, message = REFUSED[case]
    with pytest.raises(KernelError, match=message) as error:
        window_scores(**(dict(Q=Q0, K=K0, backend=backend) | change))
    assert "\n" not in str(error.value)

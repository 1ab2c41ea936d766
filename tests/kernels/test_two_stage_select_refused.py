"""What two_stage_select refuses: one line, with what was given and what is allowed."""

import math

import pytest
import torch

from kvprobe_kernels import KernelError, two_stage_select

INF = math.inf


def changed(rows, n, at, value):
    tensor = torch.ones(rows, n)
    tensor[at] = value
    return tensor


ONES = torch.ones(2, 6)
REFUSED = {
    "nan score": (dict(scores=changed(2, 6, (1, 3), math.nan)), r"scores hold nan at position 3 of row 1: allowed"),
    "inf score": (dict(scores=changed(2, 6, (0, 2), INF)), r"scores hold inf at position 2 of row 0: .*protected"),
    "nan norm": (dict(norms=changed(2, 6, (1, 0), math.nan)), r"norms hold nan at position 0 of row 1: allowed"),
    "norm < 0": (dict(norms=changed(2, 6, (0, 5), -0.5)), r"norms hold -0.5 at position 5 of row 0: allowed"),
    "inf norm": (dict(norms=changed(2, 6, (0, 5), INF)), r"norms hold inf at position 5 of row 0"),
    "few": (dict(protected=torch.arange(6) > 1), r"budgets is 3 in row 0: allowed are 4 \(its prot.*\) to 6"),
    "many": (dict(budgets=torch.tensor([3, 7])), r"budgets is 7 in row 1: allowed are 0 \(its pro.*\) to 6 \(its cand"),
    "dead": (dict(scores=changed(2, 6, (1, slice(0, 4)), -INF)), r"budgets is 3 in row 1: .* to 2 \(its candidates\)"),
    "dead kept": (
        dict(scores=changed(2, 6, (1, 0), -INF), protected=torch.arange(6) < 1),
        r"protected marks an entry that is no candidate, -inf at position 0 of row 1",
    ),
    "negative": (dict(budgets=torch.tensor([-1, 7])), r"budgets is -1 in row 0: allowed are integers from 0"),
    "float budget": (dict(budgets=3.0), r"budgets=3.0: allowed are an int or an integer tensor \[J\] or \[\*B, J\]"),
    "bool budget": (dict(budgets=True), r"budgets=True: allowed are an int"),
    "float budgets": (dict(budgets=torch.ones(2)), r"budgets is torch.float32 \[2\]: allowed are an int, or integers"),
    "budget shape": (dict(budgets=torch.ones(3).long()), r"budgets is torch.int64 \[3\]: .* of shape \[2\] or \[2\]"),
    "at_least": (dict(at_least=-2), r"at_least is -2 in row 0: allowed are integers from 0"),
    "alpha": (dict(alpha=1.5), r"alpha=1.5: allowed are numbers from 0 to 1"),
    "alpha nan": (dict(alpha=math.nan), r"alpha=nan: allowed are numbers from 0 to 1"),
    "alpha text": (dict(alpha="0.5"), r"alpha='0.5': allowed are numbers from 0 to 1"),
    "epsilon": (dict(epsilon=-1e-4), r"epsilon=-0.0001: allowed are finite numbers from 0"),
    "epsilon inf": (dict(epsilon=INF), r"epsilon=inf: allowed are finite numbers from 0"),
    "flat": (dict(scores=torch.ones(6)), r"scores are torch.float32 \[6\]: .*floating-point \[\*B, J, n\]"),
    "integers": (dict(scores=torch.ones(2, 6).long()), r"scores are torch.int64 \[2, 6\]: allowed are floating-point"),
    "norm shape": (dict(norms=torch.ones(2, 5)), r"norms are torch.float32 \[2, 5\]: .*floating-point \[2, 6\]"),
    "mask shape": (dict(protected=torch.ones(5).bool()), r"protected is torch.bool \[5\]: allowed are bool \[n\]"),
    "mask type": (dict(protected=torch.ones(6)), r"protected is torch.float32 \[6\]: allowed are bool \[n\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_was_given_and_what_is_allowed(backend, case):
    change, message = REFUSED[case]
    arguments = dict(scores=ONES, norms=ONES, budgets=3, backend=backend) | change
    with pytest.raises(KernelError, match=message) as error:
        two_stage_select(**arguments)
    assert "\n" not in str(error.value)


def test_a_row_of_a_batch_is_named_by_its_indices(backend):
    scores = torch.ones(2, 3, 4)
    scores[1, 2, 3] = math.nan
    with pytest.raises(KernelError, match=r"scores hold nan at position 3 of row \(1, 2\)"):
        two_stage_select(scores, None, 1, backend=backend)

"""Products are exact whatever a process has allowed, and its choice is there again afterwards."""

import subprocess
import sys

import pytest

CODE = """
import torch
from kvprobe_kernels import projected_norm, window_scores
{choice}
V, W = torch.randn(1, 300, 64), torch.randn(1, 64, 256)
Q = torch.randn(1, 8, 64)
def state():
    return torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision
before = state()
norms = projected_norm(V, W)
scores = window_scores(Q, V, "none", 1)
assert state() == before, (state(), before)
exact = (V.double() @ W.double()).abs().sum(-1)
assert ((norms - exact).abs() / exact).max() < 1e-5
truth = window_scores(Q, V, "none", 1, backend="reference")
assert (scores - truth).abs().max() < 1e-6
assert ((V @ W).double() - V.double() @ W.double()).abs().max() > 1e-3, "the choice does nothing here"
"""


@pytest.mark.parametrize(
    "choice",
    ["torch.set_float32_matmul_precision('medium')", "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'"],
)
def test_a_process_that_allows_less(choice):
    done = subprocess.run([sys.executable, "-c", CODE.format(choice=choice)], capture_output=True, text=True)
    assert done.returncode == 0 or "the choice does nothing here" in done.stderr, done.stderr


def test_a_process_that_used_the_newer_setting():
    choice = "torch.backends.fp32_precision = 'tf32'"
    code = CODE.format(choice=choice).rsplit("\n", 2)[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

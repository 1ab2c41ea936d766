"""Which backend runs, what it costs to import, and what is refused."""

import subprocess
import sys

import pytest
import torch

import kvprobe_kernels
from kvprobe_kernels import BACKENDS, KernelError, projected_norm
from kvprobe_kernels.dispatch import implementation

OPERATIONS = ("projected_norm", "two_stage_select", "window_scores")


def run(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("backend", "module"), [("reference", "reference"), ("torch", "torch_impl")])
def test_the_named_backend_is_the_one_that_runs(operation, backend, module):
    function = implementation(operation, backend, "cpu")
    assert function.__module__ == f"kvprobe_kernels.{operation}.{module}"
    assert function.__name__ == operation


def test_public_names():
    assert set(kvprobe_kernels.__all__) == {"BACKENDS", "KernelError", *OPERATIONS}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_function_wins_over_the_folder_of_its_name(operation):
    code = "import kvprobe_kernels.{0}.reference; from kvprobe_kernels import {0}; assert callable({0})"
    done = run(code.format(operation))
    assert done.returncode == 0, done.stderr


def test_triton_is_imported_only_when_chosen():
    code = """
import sys, torch
from kvprobe_kernels import *
projected_norm(torch.ones(1, 3, 4), torch.ones(2, 4, 5))
assert "triton" not in sys.modules
assert not {"kvprobe", "transformers", "transformer_lens"} & sys.modules.keys()
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", ["cuda", "Torch", "auto", "", None])
def test_an_unknown_backend_is_refused(backend):
    with pytest.raises(KernelError) as raised:
        projected_norm(torch.ones(1, 3, 4), torch.ones(2, 4, 5), backend=backend)
    assert str(raised.value) == f"backend={backend!r}: allowed are 'reference', 'torch', 'triton'"


def test_kernel_errors_are_value_errors():
    assert issubclass(KernelError, ValueError)
    assert BACKENDS == ("reference", "torch", "triton")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_triton_refuses_the_cpu_and_names_the_alternative(operation):
    with pytest.raises(KernelError) as raised:
        implementation(operation, "triton", "cpu")
    assert str(raised.value).startswith("backend='triton': the tensors are on 'cpu', and Triton needs 'cuda'")
    assert str(raised.value).endswith("backend='torch' runs on any device")


def test_triton_on_the_cpu_is_judged_by_the_kernels_not_by_the_variable():
    code = """
import os, triton
from kvprobe_kernels.dispatch import KernelError, implementation
implementation("projected_norm", "triton", "cuda")
os.environ["TRITON_INTERPRET"] = "1"
try:
    implementation("projected_norm", "triton", "cpu")
except KernelError:
    print("refused")
"""
    assert run(code).stdout == "refused\n"
    assert run("import os; os.environ['TRITON_INTERPRET'] = '1'\n" + code).stdout == ""


def test_missing_triton_is_named():
    code = """
import sys
sys.modules["triton"] = None
from kvprobe_kernels.dispatch import KernelError, implementation
try:
    implementation("projected_norm", "triton", "cuda")
except KernelError as error:
    print(error)
"""
    wanted = "backend='triton': triton is not installed (pip install 'kvprobe[triton]'); "
    assert run(code).stdout == wanted + "backend='torch' runs on any device\n"


def test_another_missing_module_is_not_taken_for_a_missing_triton():
    code = """
import sys
sys.modules["kvprobe_kernels.projected_norm.factor"] = None
from kvprobe_kernels.dispatch import implementation
implementation("projected_norm", "triton", "cuda")
"""
    done = run(code)
    assert "ModuleNotFoundError" in done.stderr
    assert "KernelError" not in done.stderr

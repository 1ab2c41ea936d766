"""The operations' own tests once more, on Triton's interpreter, in a process that is started with it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NOT_OPERATIONS = {"test_triton.py", "test_compile.py", "test_dispatch.py", "test_precision.py"}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a minute of processor time, which a busy machine stretches
def test_operations_pass_on_the_interpreter():
    files = sorted(str(path) for path in HERE.glob("test_*.py") if path.name not in NOT_OPERATIONS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", "triton", *files]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=HERE.parents[1],
        env=os.environ | one_thread | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    summary = output.strip().splitlines()[-1]
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed[1]) > 0, output
    assert not re.search(r"\d+ (skipped|xfailed|xpassed|failed|error)", summary), output


@pytest.mark.slow
def test_each_operation_has_tests_on_the_interpreter():
    """A test file that forgets the ``backend`` fixture would leave its kernel untested without a sign."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        str(HERE),
    ]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    for operation in ("projected_norm", "two_stage_select", "window_scores"):
        assert re.search(rf"test_{operation}\w*\.py::.*\btriton\b", done.stdout), f"{operation}\n{done.stdout}"

"""Every test that takes ``backend`` runs on each backend that the process can run."""

import os

import pytest

# Triton reads the variable when it is imported, so one process has either its interpreter or its compiler;
# test_triton.py starts the process that has the interpreter.
BACKENDS = ["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["reference", "torch"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param

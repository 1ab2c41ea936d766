"""Every kernel compiles ahead of time, and nothing of it spills."""

from importlib import import_module

import pytest
import triton_aot

OPERATIONS = ("projected_norm", "two_stage_select", "window_scores")
# Bytes of shared memory that one program may take.
SHARED = {80: 166912, 90: 232448, 100: 232448}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("arch", triton_aot.ARCHITECTURES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_compile_without_spills(operation, arch):
    cases = list(import_module(f"kvprobe_kernels.{operation}.triton_impl").aot_cases())
    assert cases
    assert len({case[0] for case in cases}) == len(cases), "names repeat"
    found = {case[0]: triton_aot.compile_case(case, arch) for case in cases}
    assert not {name: used for name, used in found.items() if used.spilled}
    assert not {name: used for name, used in found.items() if used.shared > SHARED[arch]}
    assert all(0 < used.registers <= 255 for used in found.values())


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_a_spill_is_seen():
    """Held to 64 registers, a tile of 128 × 128 cannot stay in them: the check must say so."""
    cases = import_module("kvprobe_kernels.projected_norm.triton_impl").aot_cases()
    name, kernel, signature, constants, options = next(iter(cases))
    used = triton_aot.compile_case((name, kernel, signature, constants, options | {"maxnreg": 64}), 90)
    assert used.spilled > 0
    assert used.registers <= 64

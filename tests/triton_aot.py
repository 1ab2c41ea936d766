"""Compile Triton kernels ahead of time, without a GPU, and read what the assembler says they use.

The contract: each ``kvprobe_kernels/<op>/triton_impl.py`` has

    def aot_cases() -> Iterator[tuple[str, JITFunction, dict[str, str], dict[str, object], dict[str, int]]]

that yields ``(name, kernel, signature, constexprs, options)`` for every kernel and configuration that it launches:

* ``name``: unique in the op, such as ``"l1-bf16-d128"``;
* ``kernel``: the ``@triton.jit`` function itself;
* ``signature``: argument name → Triton type for **every** argument: ``"*fp32"``, ``"*bf16"``, ``"*fp16"``, ``"*i1"``
  (bool tensors), ``"*i64"``, ``"i32"``, ``"i64"``, ``"fp32"``, and ``"constexpr"`` for those in ``constexprs``;
* ``constexprs``: argument name → value of every ``tl.constexpr`` argument;
* ``options``: launch options, such as ``{"num_warps": 4, "num_stages": 3}``.

``test_compile.py`` compiles every case for sm_80, sm_90 and sm_100 and asserts that nothing spills to local memory.
The functions here need a process without TRITON_INTERPRET.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = (80, 90, 100)


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes: registers a thread, bytes of local memory a thread, bytes of shared memory."""

    registers: int
    stack: int
    local: int
    shared: int

    @property
    def spilled(self) -> int:
        return self.stack + self.local


def compile_case(case, arch, aligned=True):
    """Compile one of ``aot_cases()`` for ``sm_<arch>``.

    ``aligned`` says that every pointer and integer is a multiple of 16, as Triton's launcher finds for most real
    tensors: loads become wide and asynchronous, which is what takes the most registers.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _, kernel, signature, constexprs, options = case
    assert list(signature) == kernel.arg_names, f"signature names {list(signature)}, the kernel has {kernel.arg_names}"
    wide = {(at,): [["tt.divisibility", 16]] for at, kind in enumerate(signature.values()) if _may_be_wide(kind)}
    source = ASTSource(kernel, signature, constexprs, wide if aligned else {})
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options))
    return resources(compiled.asm["cubin"], compiled.metadata.shared)


def _may_be_wide(kind):
    return kind.startswith("*") or kind in ("i32", "i64")


def resources(cubin, shared):
    """Read ``cuobjdump --dump-resource-usage``; shared memory is the launch's, which the cubin does not hold."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True)
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    assert len(found) == 1, f"cuobjdump names {len(found)} functions:\n{done.stdout}"
    registers, stack, local = map(int, found[0])
    return Resources(registers, stack, local, shared)

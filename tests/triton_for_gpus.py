"""What Triton makes of kernels for GPUs that are not there, as far as its PTX says. Spills show in
the machine code alone: see `bench.codegen`.

A test module lists its kernels as CASES, by name. They are compiled in a process of their own, as
the tests' process may have Triton's functions in the interpreter:

    python -m tests.triton_for_gpus FILE

prints for each case of the file what `check` looks at.
"""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from attention_kernels.support import shared_bytes
from tests.paths import ROOT

TENSOR_CORES = {90: "wgmma.mma_async", 100: "tcgen05.mma"}  # on others mma.sync
INSTRUCTIONS = (*TENSOR_CORES.values(), "mma.sync", "cp.async")
DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Case:
    """A kernel and its arguments: those that are not named here are int32. A field of an argument
    that is a named tuple is named ARGUMENT.FIELD."""

    capability: int  # 90 for sm_90
    kernel: Any
    pointers: Mapping[str, str]  # and the types of what is there
    constants: Mapping[str, object]
    floats: Collection[str] = ()  # fp32 numbers
    tuples: Mapping[str, Any] = field(default_factory=dict)  # and their types
    options: Mapping[str, int] = field(default_factory=dict)
    multiplies: bool = False  # on the chip's own tensor cores
    loads_ahead: bool = False


def check(case: Case, found: Mapping[str, int]) -> None:
    assert found["calls in the loop"] == 0, "a call keeps its arguments in another layout"
    assert found["shared_bytes"] <= shared_bytes(divmod(case.capability, 10))
    if case.multiplies:
        wanted = TENSOR_CORES.get(case.capability, "mma.sync")
        assert found[wanted] > 0 and (wanted == "mma.sync" or found["mma.sync"] == 0), found
    if case.loads_ahead:
        assert found["cp.async"] > 0, "nothing is read ahead"


def compile_apart(file: str) -> dict[str, dict[str, int]]:
    """What `check` looks at, for each of the file's CASES."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.triton_for_gpus", file],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"},
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def compile_case(case: Case) -> dict[str, int]:
    """With strides and addresses that are multiples of 16, as at run time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants: dict[tuple[int, ...], object] = {}
    attributes: dict[tuple[int, ...], object] = {}

    def kind(name: str, *path: int) -> str:
        if name in case.pointers or "stride" in name:
            attributes[path] = DIVISIBLE
        if name in case.pointers:
            return "*" + case.pointers[name]
        if name in case.constants:
            constants[path] = case.constants[name]
            return "constexpr"
        return "fp32" if name in case.floats else "i32"

    signature: dict[str, Any] = {}
    for i, name in enumerate(case.kernel.arg_names):
        if group := case.tuples.get(name):
            kinds = (kind(f"{name}.{part}", i, j) for j, part in enumerate(group._fields))
            signature[name] = group(*kinds)
        else:
            signature[name] = kind(name, i)
    source = ASTSource(case.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", case.capability, 32)
    compiled = triton.compile(source, target=target, options=dict(case.options))
    return {
        "shared_bytes": compiled.metadata.shared,
        "calls in the loop": compiled.asm["ttgir"].partition("scf.for")[2].count("tt.call"),
        **{name: compiled.asm["ptx"].count(name) for name in INSTRUCTIONS},
    }


if __name__ == "__main__":
    cases = runpy.run_path(sys.argv[1])["CASES"]
    print(json.dumps({name: compile_case(case) for name, case in cases.items()}))

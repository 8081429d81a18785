"""What Triton makes of kernels for GPUs that are not there, as far as its PTX says. Spills show in
the machine code alone: see `bench.codegen`.

A test module lists its kernels as CASES: by name, the chip (90 for sm_90) and the case. They are
compiled in a process of their own, as the tests' process may have Triton's functions in the
interpreter:

    python -m tests.triton_for_gpus FILE

prints for each case of the file what `check` looks at.
"""

import json
import runpy
import sys
from collections.abc import Mapping

from attention_kernels.support import shared_bytes
from bench.codegen.case import Case
from tests.paths import ROOT
from tests.processes import output_of

TENSOR_CORES = {90: "wgmma.mma_async", 100: "tcgen05.mma"}  # on others mma.sync
INSTRUCTIONS = (*TENSOR_CORES.values(), "mma.sync", "cp.async")


def check(chip: int, case: Case, found: Mapping[str, int]) -> None:
    assert found["calls in the loop"] == 0, "a call keeps its arguments in another layout"
    assert found["shared_bytes"] <= shared_bytes(divmod(chip, 10))
    if case.multiplies:
        wanted = TENSOR_CORES.get(chip, "mma.sync")
        assert found[wanted] > 0 and (wanted == "mma.sync" or found["mma.sync"] == 0), found
    if case.loads_ahead:
        assert found["cp.async"] > 0, "nothing is read ahead"


def compile_apart(file: str) -> dict[str, dict[str, int]]:
    """What `check` looks at, for each of the file's CASES."""
    variables = {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    printed = output_of("-m", "tests.triton_for_gpus", file, variables=variables)
    return json.loads(printed)


def compile_case(chip: int, case: Case) -> dict[str, int]:
    compiled = case.compile(chip)
    return {
        "shared_bytes": compiled.metadata.shared,
        "calls in the loop": compiled.asm["ttgir"].partition("scf.for")[2].count("tt.call"),
        **{name: compiled.asm["ptx"].count(name) for name in INSTRUCTIONS},
    }


if __name__ == "__main__":
    cases = runpy.run_path(sys.argv[1])["CASES"]
    print(json.dumps({name: compile_case(*case) for name, case in cases.items()}))

"""What Triton makes of the kernels for Hopper and Blackwell, compiled where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attention_kernels.support import shared_bytes
from tests.paths import ROOT

SCRIPT = Path(__file__).parent / "compile_triton.py"
CASES = {  # capability, head size, query heads a key head, page, cache dtype
    "sm_90 sliding": (90, 256, 2, 16, "bf16"),
    "sm_90 full": (90, 512, 8, 128, "bf16"),
    "sm_90 sliding fp8": (90, 256, 2, 64, "fp8e4nv"),
    "sm_100 sliding": (100, 256, 2, 128, "bf16"),
    "sm_100 full": (100, 512, 8, 16, "bf16"),
    "sm_80 sliding": (80, 256, 2, 16, "bf16"),
    "sm_80 full": (80, 512, 8, 16, "bf16"),
    "sm_89 sliding fp8": (89, 256, 2, 16, "fp8e4nv"),
    "sm_120 full": (120, 512, 8, 16, "bf16"),
    "sm_120 a large group": (120, 512, 128, 16, "bf16"),
    "sm_90 a large group": (90, 512, 128, 16, "bf16"),
}
TENSOR_CORES = {90: "wgmma.mma_async", 100: "tcgen05.mma"}  # on others mma.sync


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    process = subprocess.run(
        [sys.executable, SCRIPT, json.dumps(list(CASES.values()))],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"},
    )
    assert process.returncode == 0, process.stderr
    return dict(zip(CASES, json.loads(process.stdout), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_uses_the_tensor_cores_and_fits(compiled: dict[str, dict[str, int]], case: str) -> None:
    found, capability = compiled[case], CASES[case][0]
    wanted = TENSOR_CORES.get(capability, "mma.sync")
    assert found[wanted] > 0 and (wanted == "mma.sync" or found["mma.sync"] == 0), found
    assert found["cp.async"] > 0, "keys and values are not loaded ahead"
    assert found["ld.local"] == 0, "registers spill"
    assert found["calls in the loop"] == 0, "a call keeps its arguments in another layout"
    assert found["shared_bytes"] <= shared_bytes(divmod(capability, 10))

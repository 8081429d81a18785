"""What Triton makes of the drafters' kernels, compiled where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attention_kernels.support import shared_bytes
from tests.paths import ROOT

SCRIPT = Path(__file__).parent / "compile_triton.py"
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@pytest.mark.parametrize("capability", TENSOR_CORES)
def test_compiles_and_fits(capability: int) -> None:
    process = subprocess.run(
        [sys.executable, SCRIPT, str(capability)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["fused, 64 tokens"][TENSOR_CORES[capability]] > 0, found
    for name, kernel in found.items():
        assert kernel["ld.local"] == 0, f"{name}: registers spill"
        assert kernel["shared_bytes"] <= shared_bytes(divmod(capability, 10)), name
        if name.startswith("fused"):
            assert kernel["cp.async"] > 0, f"{name}: the weights are not read ahead"

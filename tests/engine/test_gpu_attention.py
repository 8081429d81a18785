"""End to end on the shipped checkpoint: what GPUs attend with gives the answers that CPUs give."""

import json
import subprocess
import sys

import pytest

from tests.engine.conftest import TRAINED
from tests.engine.rounding import assert_same
from tests.paths import ROOT

pytestmark = pytest.mark.numerics

SCRIPT = "tests.engine.gpu_attention"


def test_answers_are_those_of_the_cpu() -> None:
    process = subprocess.run(
        [sys.executable, "-m", SCRIPT, TRAINED, "2"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    result = json.loads(process.stdout.rpartition("RESULT")[2])
    assert result["cpu"]["attention"] == ["CpuCanvasImpl"]
    assert result["gpu"]["attention"] == ["GpuCanvasImpl"]
    assert_same(result["gpu"]["tokens"], result["cpu"]["tokens"])
    texts = result["gpu"]["texts"]
    assert texts == result["right"]

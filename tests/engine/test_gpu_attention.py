"""End to end on the shipped checkpoint: what GPUs attend with gives the answers that CPUs give."""

import json

import pytest

from tests.engine.conftest import TRAINED
from tests.engine.rounding import assert_same
from tests.paths import ROOT
from tests.processes import output_of

pytestmark = pytest.mark.numerics

SCRIPT = "tests.engine.gpu_attention"


def test_answers_are_those_of_the_cpu() -> None:
    said = output_of("-m", SCRIPT, TRAINED, "2", cwd=ROOT)
    result = json.loads(said.rpartition("RESULT")[2])
    assert result["cpu"]["attention"] == ["CpuCanvasImpl"]
    assert result["gpu"]["attention"] == ["GpuCanvasImpl"]
    assert_same(result["gpu"]["tokens"], result["cpu"]["tokens"])
    texts = result["gpu"]["texts"]
    assert texts == result["right"]

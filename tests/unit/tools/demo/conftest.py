"""A question about a picture."""

from pathlib import Path

import pytest

from tests.unit.tools.demo.recorded import PIXELS
from vllm_dllm.tools.demo.questions import Question


@pytest.fixture
def with_picture(tmp_path: Path) -> Question:
    PIXELS.save(tmp_path / "shown.png")
    return Question("What number is shown?", tmp_path / "shown.png")

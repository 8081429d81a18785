"""`reload_weights` and sleep with masked models. test_reloading.py says what a reload must do."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import Engine
from tests.engine.masked import CONFIGS, make_checkpoint
from tests.engine.reloads import OPTIONS, altered, answers, reload, require_second_weights


@pytest.mark.parametrize("architecture", CONFIGS)
def test_masked_models(engine: Callable[..., Engine], tmp_path: Path, architecture: str) -> None:
    first, _ = make_checkpoint(tmp_path / "first", 16, architecture)
    second = altered(first, tmp_path / "second")
    of_second = answers(engine(second, **OPTIONS).llm)
    served = engine(first, **OPTIONS).llm
    of_first = answers(served)
    require_second_weights(served, second, of_second)
    reload(served, first)
    assert answers(served) == of_first

"""These tests need PyTorch and Triton alone; vLLM may be absent."""

from types import ModuleType

import pytest

from tests.triton_version import interpreted_without_gpu


@pytest.fixture(scope="session")
def triton_version() -> ModuleType:
    return interpreted_without_gpu()

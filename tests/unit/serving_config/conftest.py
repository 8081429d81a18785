"""Configurations of vLLM for checkpoints of diffusion models."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.paths import CHECKPOINTS
from vllm_dllm import plugin

Configure = Callable[..., VllmConfig]


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> Configure:
    plugin.register()
    folder = str(CHECKPOINTS / "sdar-tiny")
    return lambda **options: EngineArgs(
        folder, enforce_eager=True, **options
    ).create_engine_config()


@pytest.fixture(scope="module")
def configure(tmp_path_factory: pytest.TempPathFactory) -> Configure:
    plugin.register()
    checkpoint = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), vision=False)

    def create(**options: Any) -> VllmConfig:
        return EngineArgs(str(checkpoint), enforce_eager=True, **options).create_engine_config()

    return create

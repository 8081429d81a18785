"""vLLM's process group, of this process alone, and small quantised checkpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.config import VllmConfig, set_current_vllm_config

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.engine import quantized
from tests.engines import one_rank


@pytest.fixture(scope="module", autouse=True)
def in_a_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("store")), set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each scheme, large enough that scales are small beside the weights."""
    folder = tmp_path_factory.mktemp("quantised")
    plain = make_tiny_checkpoint(
        folder / "plain", hidden_size=128, intermediate_size=128, moe_intermediate_size=64
    )
    return {s: quantized.quantize(plain, folder / s, s) for s in quantized.FORMATS}

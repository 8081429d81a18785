"""vLLM's process group, of this process alone, and small quantised checkpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.engine import quantized


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's layers ask for their tensor-parallel rank when they are built."""
    store = tmp_path_factory.mktemp("store") / "store"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        initialize_model_parallel()
        yield
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each scheme, large enough that scales are small beside the weights."""
    folder = tmp_path_factory.mktemp("quantised")
    plain = make_tiny_checkpoint(
        folder / "plain", hidden_size=128, intermediate_size=128, moe_intermediate_size=64
    )
    return {s: quantized.quantize(plain, folder / s, s) for s in quantized.FORMATS}

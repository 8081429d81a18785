"""vLLM's process group, of this process alone."""

from collections.abc import Iterator

import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's layers ask for their tensor-parallel rank when they are built."""
    store = tmp_path_factory.mktemp("store") / "store"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        initialize_model_parallel()
        yield
        cleanup_dist_env_and_memory()

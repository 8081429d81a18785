"""What every test gets: a fixed seed, threads that sleep while they wait, and the GPU it needs."""

import os

# libgomp reads it when torch is imported. Engines and transformers share the cores, and threads
# that spin between parallel regions take them from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

SLOW = {"serving", "e2e"}  # folders whose tests start engines


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in SLOW:
            item.add_marker(pytest.mark.slow)
    if not torch.cuda.is_available():
        on_gpu = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)

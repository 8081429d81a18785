"""What every test gets: a fixed seed, and threads that sleep while they wait."""

import os

# libgomp reads it when torch is imported. Engines and transformers share the cores, and threads
# that spin between parallel regions take them from the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)

"""How many operations a plain step launches outside of the model, at the sizes of the 26B model."""

from collections import Counter
from typing import Any

import pytest
import torch

from tests.gpu_dry_run import test_step
from tests.gpu_dry_run.fake_cuda import FakeCuda

CANVAS, VOCABULARY = 256, 262_144
KINDS = ("plain", "seeded", "greedy", "symmetric")
FOR_METRICS = 1
MOST = {1: 20 + FOR_METRICS, 4: 38 + FOR_METRICS}
"""By the number of canvases: what a step launched when this was written. The aim was 40 for one."""


@pytest.fixture
def server(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(test_step, "C", CANVAS)
    monkeypatch.setattr(test_step.model_state, "build_attn_metadata", lambda **kwargs: kwargs)
    return test_step.start(cuda, VOCABULARY, torch.bfloat16)


@pytest.mark.parametrize("canvases", MOST)
def test_a_step_launches_no_more_than_it_did(
    server: test_step.Server, cuda: FakeCuda, canvases: int
) -> None:
    server.admit(*KINDS[:canvases])
    server.step()
    cuda.launches.clear()
    server.step()
    assert cuda.waits == []
    assert len(cuda.launches) <= MOST[canvases], Counter(cuda.launches).most_common()

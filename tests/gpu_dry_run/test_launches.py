"""How many operations a plain step launches outside of the model, at the sizes of the 26B model."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu_dry_run import test_step
from tests.gpu_dry_run.fake_cuda import FakeCuda, fake_cuda
from vllm_dllm.step.runner import model_state

CANVAS, VOCABULARY = 256, 262_144
KINDS = ("plain", "seeded", "greedy", "symmetric")
FOR_METRICS = 1
MOST = {1: 20 + FOR_METRICS, 4: 38 + FOR_METRICS}
"""By the number of canvases: what a step launched when this was written. The aim was 40 for one."""
CAPTURED = 4 + FOR_METRICS
"""Two replays, a copy of the hidden states to where the second finds them, and one of what it
tells."""
REPLAY = "a graph's replay"


@pytest.fixture
def server(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(test_step, "C", CANVAS)
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


@contextmanager
def capturing(*_: Any) -> Iterator[Callable[..., Any]]:
    """Graphs that are launched as one."""
    device = fake_cuda()

    def capture(run: Callable[[], Any]) -> tuple[Any, Any]:
        return SimpleNamespace(replay=lambda: device.launches.append(REPLAY)), run()

    yield capture


@pytest.mark.parametrize("canvases", (1, 4, 16))
def test_a_captured_step_is_two_replays(
    server: test_step.Server, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, canvases: int
) -> None:
    monkeypatch.setattr(model_state, "capture_graphs", capturing)
    server.capture(most=16)
    assert cuda.waits == []
    others = [f"plain {i}" for i in range(12)]
    for kind in others:
        monkeypatch.setitem(test_step.ALL, kind, {})
    server.admit(*[*KINDS, *others][:canvases])
    server.step()
    cuda.launches.clear()
    cuda.copies.clear()
    server.step()
    assert cuda.waits == cuda.copies == []
    assert cuda.launches.count(REPLAY) == 2
    assert len(cuda.launches) <= CAPTURED, Counter(cuda.launches).most_common()


@pytest.mark.parametrize(
    "kind", ["penalties", "truncated", "log-probabilities", "revealing", "narrow"]
)
def test_other_steps_are_taken_as_ever(
    server: test_step.Server, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Their canvases are whole, so what comes before the forward is a replay."""
    monkeypatch.setattr(model_state, "capture_graphs", capturing)
    server.capture(most=4)
    server.admit("plain", kind)
    cuda.launches.clear()
    server.step()
    assert cuda.launches.count(REPLAY) == (kind != "narrow")
    assert "_temperature_and_noise_kernel" in cuda.launches

"""The bench at the 26B model's size: its rules, and its probe in the worker."""

from types import SimpleNamespace

import pytest
import torch

from bench import full_shape, harness
from bench.full_shape_engine import OURS, STOCK, WorkerProbe


@pytest.mark.parametrize(
    ("run", "refused"),
    [
        ({"steps_per_block": 16.0, "shortest": 512}, False),
        ({"steps_per_block": 15.5, "shortest": 512}, True),
        ({"steps_per_block": 16.0, "shortest": 511}, True),
    ],
    ids=["all", "a step spared", "a token less"],
)
def test_refuses_runs_of_other_lengths(run: dict[str, float], refused: bool) -> None:
    if refused:
        with pytest.raises(harness.Refused):
            full_shape.require_every_step(OURS, run)
    else:
        full_shape.require_every_step(OURS, run)


def test_comparison() -> None:
    def cells(**medians: float) -> dict[str, object]:
        return {"cells": {c[1:]: {"ms_per_step": {"median": ms}} for c, ms in medians.items()}}

    found = full_shape.compare({OURS: cells(_1=10, _32=50, _64=90), STOCK: cells(_1=12, _32=75)})
    assert found["1 at once"] == {"ratio": 1.2, "bar": 1.25, "met": False}
    assert found["32 at once"] == {"ratio": 1.5, "bar": 1.5, "met": True}
    assert "32 at once" not in full_shape.compare({OURS: cells(_1=10), STOCK: cells(_1=12)})


def test_probe() -> None:
    """Steps without tokens, which tell a worker of ended requests, are no forwards."""
    layers = {"layer": torch.nn.Linear(4, 2), "vision_tower": torch.nn.Linear(9, 9)}
    model = torch.nn.ModuleDict(layers)
    asked = []

    class Worker(WorkerProbe):
        device = torch.device("cpu")
        model_runner = SimpleNamespace(model=model)

        def execute_model(self, scheduled: SimpleNamespace) -> None:
            asked.append(scheduled.total_num_scheduled_tokens)

    worker = Worker()
    assert worker.num_forwards() == 0
    for tokens in (5, 0, 3, 2):
        worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=tokens))
    assert asked == [5, 0, 3, 2]
    assert worker.num_forwards() == 3
    assert len(worker.steps_ms(0)) == 2 and all(ms >= 0 for ms in worker.steps_ms(0))
    assert worker.weight_bytes() == 4 * (4 * 2 + 2)
    worker.start_peak_memory()
    before = worker.peak_memory()
    held = torch.ones(100 << 20, dtype=torch.uint8)
    assert worker.peak_memory() - before > 90 << 20
    del held

"""The bench at the 26B model's size: its rules, and its probe in the worker."""

import mmap
from types import SimpleNamespace

import pytest
import torch

from bench import even_routing, full_shape, harness
from bench.dummy_checkpoint import CANVAS
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
            full_shape.require_every_step(OURS, run, blocks=2)
    else:
        full_shape.require_every_step(OURS, run, blocks=2)


def cells(experts: int, **medians: float) -> dict[str, object]:
    return {
        "cells": {
            name[1:]: {"ms_per_step": {"median": ms}, "experts_read": experts}
            for name, ms in medians.items()
        }
    }


def test_engines_that_read_different_experts_are_not_compared() -> None:
    results = {OURS: cells(64, _1x128=10), STOCK: cells(70, _1x128=12)}
    with pytest.raises(harness.Refused, match="ours reads 64 experts a layer, stock 70"):
        full_shape.compare("bf16", results)


def test_the_context_has_room_for_a_canvas_that_is_scheduled_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = ["--systems", OURS, "--cells", "1x128", "--trace", "1x32768"]
    monkeypatch.setattr("sys.argv", ["full_shape", *cells])
    settings = full_shape.commands(full_shape.read_arguments(), "checkpoint")[OURS]
    assert settings["max_model_len"] == 32_768 + 2 * CANVAS


def test_even_routing_is_even_the_same_and_counted() -> None:
    routing = even_routing.EvenRouting()
    with pytest.raises(RuntimeError, match=r"experts of 4 rows or more, got \[\]"):
        routing.experts_read(4)
    states, logits = torch.zeros(4096, 8), torch.zeros(4096, 16)
    weights, experts = routing.route_tokens(states, logits, 4, torch.int32)
    assert experts.dtype == torch.int32 and (weights.sum(-1) == 1).all()
    assert all(len(row.unique()) == 4 for row in experts[:64])
    rows = torch.bincount(experts.flatten(), minlength=16)
    assert rows.min() > 0.9 * 1024 and rows.max() < 1.1 * 1024  # of 1,024 each
    again = even_routing.EvenRouting().route_tokens(states[:7], logits[:7], 4)[1]
    assert (again == experts[:7]).all()
    experts[:] = 0  # what is given away may be written to
    assert routing.experts_read(4096) == 16
    routing.called = {1, 4096}
    assert routing.experts_read(1) == len(again[0].unique())


def test_probe() -> None:
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
    held = mmap.mmap(-1, 100 << 20)  # not from a heap, which may have that much to spare
    held.write(bytes(len(held)))
    assert worker.peak_memory() - before > 90 << 20
    held.close()

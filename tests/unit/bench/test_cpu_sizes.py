"""What `bench.cpu_sizes` makes of its measurements."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench import cpu_sizes_systems
from bench.cpu_sizes import groups
from bench.cpu_sizes_growth import fit
from bench.cpu_sizes_report import bars
from bench.cpu_sizes_systems import SizesProbe

CANVAS = 256


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(cpu_sizes_systems.time, "perf_counter", lambda: now.s)
    return now


def test_steps_of_full_canvases_are_timed(clock: SimpleNamespace) -> None:
    """The first of two requests came a step before the other."""

    def execute(scheduled: Any) -> None:
        clock.s += scheduled.ms / 1000

    def sample() -> None:
        clock.s += 0.001

    probe = SizesProbe()
    probe.execute_model, probe.sample_tokens = execute, sample
    assert probe.num_forwards() == 0
    for rows, ms in ((63 + CANVAS, 10), (63 + 2 * CANVAS, 20), (2 * CANVAS, 30), (CANVAS, 15)):
        probe.execute_model(SimpleNamespace(total_num_scheduled_tokens=rows, ms=ms))
        probe.sample_tokens()
        clock.s += 0.002  # until the next step
    assert probe.num_forwards() == 4
    assert probe.canvas_steps_ms(0, CANVAS, count=2) == [pytest.approx(33)]
    assert probe.canvas_steps_ms(3, CANVAS, count=2) == [pytest.approx(2 * 16)]


def test_an_exponent_is_fitted_to_the_larger_half() -> None:
    points = {size: 5.0 if size < 16 else 0.25 * size**1.5 for size in (0, 1, 2, 4, 16, 32, 64)}
    found = fit(points)
    assert found == pytest.approx({"exponent": 1.5, "factor_ms": 0.25, "from": 16, "to": 64})


def test_each_group_has_what_it_is_compared_with() -> None:
    assert groups(["fp32", "bf16", "fp8", "nvfp4"]) == [
        ["fp32", "bf16", "transformers, fp32", "transformers, bf16"],
        ["bf16", "fp8", "nvfp4"],
    ]
    assert groups(["bf16"]) == [["bf16", "transformers, bf16"]]


def measured(resident: int, **ms: float) -> dict[str, Any]:
    cells = {count[1:]: {"ms_per_step": {"median": value}} for count, value in ms.items()}
    return {"resident_bytes": resident, **cells, "32": {"not_run": "it would take long"}}


def test_bars() -> None:
    first = {"bf16": measured(900, _1=10, _8=50), "transformers, bf16": measured(0, _1=30, _8=90)}
    second = {"bf16": measured(900, _1=12), "int8": measured(600, _1=10)}
    small = {"bf16": measured(100, _1=1), "int8": measured(100, _1=2)}
    shapes = {"4M": {"groups": [{}, small]}, "60M": {"groups": [first, second]}}
    found = {bar["of"]: (bar["ratio"], bar["met"]) for bar in bars(shapes)}
    assert found == {
        "4M, int8, 1 at once, over bf16": (0.5, False),
        "60M, bf16, 1 at once, over transformers": (3.0, True),
        "60M, bf16, 8 at once, over transformers": (1.8, False),
        "60M, int8, 1 at once, over bf16": (1.2, True),
        "60M, int8, memory": (0.625, False),
    }

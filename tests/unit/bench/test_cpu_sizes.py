"""What `bench.cpu_sizes` makes of its measurements."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench import cpu_sizes_systems
from bench.cpu_sizes_growth import fit
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

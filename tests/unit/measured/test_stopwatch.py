"""What is timed, what is dropped, and which of equals is taken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_dllm.measured import stopwatch
from vllm_dllm.measured.stopwatch import Stopwatch, fastest

Log = list[str]


@pytest.fixture
def log(logged: Callable[..., Log]) -> Log:
    return logged(stopwatch)


def clock(run: Callable[[], Any]) -> float:
    """As long as the sum of what was computed."""
    return float(run().sum())


def gives(*numbers: float) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(numbers)


def raises() -> torch.Tensor:
    raise RuntimeError("out of resource: shared memory")


def test_what_is_wrong_or_fails_is_dropped_with_a_line(log: Log) -> None:
    candidates = {
        "in use": gives(1.0, 2.0, 3.0),
        "rounds otherwise": gives(1.01, 2.0, 3.0),
        "wrong": gives(1.0, 2.0, 3.5),
        "too short": gives(1.0, 2.0),
        "not a number": gives(1.0, 2.0, float("nan")),
        "fails": raises,
    }
    times = Stopwatch(clock).time_candidates("experts, 256 rows", candidates)
    assert times == pytest.approx({"in use": 6.0, "rounds otherwise": 6.01})
    assert log == [
        *(
            f"experts, 256 rows: {name} is left out, because its result differs."
            for name in ("wrong", "too short", "not a number")
        ),
        "experts, 256 rows: fails is left out: out of resource: shared memory",
    ]


def test_where_the_one_in_use_fails_nothing_is_chosen(log: Log) -> None:
    assert Stopwatch(clock).time_candidates("x", {"in use": raises, "other": gives(1.0)}) == {}
    assert len(log) == 1


def test_the_result_in_use_is_kept_from_later_writes(log: Log) -> None:
    output = torch.zeros(2)

    def write(number: float) -> Callable[[], torch.Tensor]:
        return lambda: output.fill_(number)

    assert list(
        Stopwatch(clock).time_candidates("x", {"in use": write(1.0), "other": write(2.0)})
    ) == ["in use"]


def test_nothing_is_timed_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now[0])
    watch = Stopwatch(clock, until=115)
    assert watch.time_candidates("x", {"in use": gives(1.0)}) == {"in use": 1.0}
    now[0] += 15
    assert watch.is_over and watch.time_candidates("x", {"in use": raises}) == {}


def test_of_equals_the_first_is_taken() -> None:
    assert fastest({"in use": 1.02, "other": 1.0}) == "in use"
    assert fastest({"in use": 1.03, "other": 1.01, "third": 1.0}) == "other"

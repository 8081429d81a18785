"""The clock and the log of a training run, on a clock that the test moves."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoints.recipes import run_log
from checkpoints.recipes.means import Means
from checkpoints.recipes.run_log import RunLog, earlier_log


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(run_log, "time", clock)
    return clock


def test_means_are_of_what_came_since_they_were_taken() -> None:
    means = Means()
    means.add(loss=1.0, right=0.5)
    means.add(loss=2.0)
    assert means.take() == {"loss": 1.5, "right": 0.5}
    assert not means
    means.add(loss=4.0)
    assert means.take() == {"loss": 4.0}


def test_a_run_counts_on_logs_and_saves(
    clock: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_at: list[float] = []
    earlier = [{"step": 40, "loss": 3.0, "minutes": 9.0}]
    run = RunLog(
        earlier,
        minutes=2.0,
        log_every=3,
        save_minutes=0.5,
        save=lambda: saved_at.append(clock.now),
    )
    progress = []
    for _ in range(5):
        clock.now += 30
        progress.append(run.tick())
        if run.count_step():
            run.add({"loss": 2.0}, "loss 2.00")
        run.save_now_and_then()
    assert progress == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert saved_at == [1060, 1120]  # more than half a minute after the start, and after that
    run.finish(tmp_path)
    assert saved_at[-1] == 1150
    logged = [{"step": 42, "loss": 2.0, "minutes": 1.0}, {"step": 45, "loss": 2.0, "minutes": 2.5}]
    assert earlier_log(tmp_path) == [*earlier, *logged]
    assert capsys.readouterr().out.splitlines()[0] == "step 42 loss 2.00 ETA 1.0 min"


def test_no_earlier_log(tmp_path: Path) -> None:
    assert earlier_log(None) == []
    assert earlier_log(tmp_path) == []

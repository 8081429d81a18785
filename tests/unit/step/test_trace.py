"""The trace loses lines when its disk is full, and nothing else is lost."""

import json
from pathlib import Path

import pytest

from tests.unit.config.test_files import room_for
from vllm_dllm.step.watched import observers
from vllm_dllm.step.watched.canvas_record import CanvasRecord
from vllm_dllm.step.watched.observers import CanvasTrace

C = 4


def record(written: CanvasTrace, request_id: str) -> None:
    """A step of one canvas."""
    tokens = list(range(C))
    written.write(
        request_id, CanvasRecord(1, tokens, [0, 0, 1, 1], tokens, [1.0] * C, 0.5, 3, False)
    )


def requests(path: Path) -> list[str]:
    return [json.loads(line)["request_id"] for line in path.read_text().splitlines()]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(
        observers.logger, "warning", lambda text, *values: warnings.append(text % values)
    )
    path = tmp_path / "trace.jsonl"
    written = CanvasTrace(str(path))
    record(written, "before")
    with room_for(path.stat().st_size + 20):  # of a line that is longer
        for _ in range(3):
            record(written, "lost")
    record(written, "after")
    assert requests(path) == ["before", "after"]
    (warning,) = warnings
    assert warning == (
        f"A line of the trace was dropped, and more may follow: cannot write to {path}: File too "
        f"large."
    )

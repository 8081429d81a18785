"""What unit tests of every room share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Collects what a module's logger says at a level."""

    def collect(module: Any, level: str = "warning") -> list[str]:
        lines: list[str] = []
        monkeypatch.setattr(module.logger, level, lambda text, *args: lines.append(text % args))
        return lines

    return collect


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of this machine's canvas feeds."""
    from vllm_dllm.config import canvas_feeds  # which kernels are tried without

    monkeypatch.setenv(canvas_feeds.FOLDER, str(tmp_path))
    return tmp_path

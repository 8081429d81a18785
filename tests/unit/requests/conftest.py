"""Tests here share a process, and each is an HTTP request of its own."""

from contextvars import ContextVar

import pytest

from vllm_dllm.requests import limits


@pytest.fixture(autouse=True)
def nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_total", ContextVar("of this test", default=None))

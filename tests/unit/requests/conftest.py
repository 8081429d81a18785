"""Tests here share a process, and each is an HTTP request of its own."""

import shutil
from contextvars import ContextVar
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.paths import CHECKPOINTS
from tests.unit.grammar.canvases import add_tokens
from vllm_dllm.requests import limits


@pytest.fixture(autouse=True)
def nothing_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_http_request", ContextVar("of this test", default=None))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The shipped one, with the tokens of Gemma 4's calls and channels."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINTS / "diffusiongemma-tiny" / name, folder)
    return AutoTokenizer.from_pretrained(add_tokens(folder))

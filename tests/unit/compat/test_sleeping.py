"""What is allocated beside the weights outlives the deepest sleep of a GPU's server."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dllm.compat import sleeping
from vllm_dllm.step import model_state
from vllm_dllm.step.model_state import DiffusionModelState


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that memory is taken from now."""
    current: list[str] = []

    @contextmanager
    def use_memory_pool(tag: str) -> Iterator[None]:
        current.append(tag)
        yield
        current.pop()

    allocator = SimpleNamespace(use_memory_pool=use_memory_pool)
    monkeypatch.setattr(sleeping, "get_mem_allocator_instance", lambda: allocator)
    return current


@pytest.mark.parametrize(("may_sleep", "expected"), [(True, ["runtime"]), (False, [])])
def test_requests_keep_their_state(
    pools: list[str], monkeypatch: pytest.MonkeyPatch, may_sleep: bool, expected: list[str]
) -> None:
    made_in: list[list[str]] = []

    class Step:
        canvas_length = 1

        def __init__(self, *_: Any) -> None:
            made_in.append(list(pools))

    monkeypatch.setattr(model_state, "DiffusionSampler", lambda *_: None)
    state = DiffusionModelState.__new__(DiffusionModelState)
    state.model_config = SimpleNamespace(enable_cumem_allocator=may_sleep)
    state.vllm_config, state.device, state.model = None, None, SimpleNamespace()
    state.max_num_tokens = state.max_num_reqs = 1
    state.step_cls = Step
    state.custom_sampler(None)
    assert made_in == [expected]
    assert pools == []

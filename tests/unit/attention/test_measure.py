"""Layers of a model timed by a clock that is told what each version takes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vllm_dllm.attention.gpu
from tests.triton_version import interpreted_without_gpu
from tests.unit.attention.test_gpu_backend import StandIn
from vllm_dllm.attention import measure as measuring
from vllm_dllm.attention.choice import Choice, Times
from vllm_dllm.attention.flash_attention import FlashAttention
from vllm_dllm.attention.gpu import GpuCanvasBackend
from vllm_dllm.measured.stopwatch import Stopwatch

HQ, HKV, D, PAGE, CANVAS = 4, 2, 32, 16, 8
TRITON = Choice(((0, "triton"),))


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    interpreted_without_gpu()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """FlashAttention-4 for layers without a window; others have Triton alone."""
    stand_in = StandIn()
    attention = FlashAttention(stand_in, has_flags=True, has_masks=False)
    monkeypatch.setattr(vllm_dllm.attention.gpu, "choose_versions", lambda *_: (TRITON, None))
    monkeypatch.setattr(
        FlashAttention,
        "find",
        lambda kind, *_: "it takes no window" if kind.has_window else attention,
    )
    monkeypatch.setattr(measuring, "CONTEXTS", (0, 16, 64, 500))
    return stand_in


def layer(window: int | None) -> Any:
    return SimpleNamespace(
        impl=GpuCanvasBackend.get_impl_cls()(HQ, D, 0.3, HKV, None, window, "auto"),
        kv_cache=torch.zeros(6, HKV, PAGE, 2 * D),
    )


def measure(layers: list[Any], stand_in: StandIn, longest: int = 80) -> list[dict[str, Any]]:
    def clock(run: Any) -> float:
        stand_in.calls.clear()
        rows = len(run())
        return rows if stand_in.calls else 20.0

    return measuring.measure_attention(
        layers, torch.float32, CANVAS, (1, 3), longest, Stopwatch(clock)
    )


def test_times_of_each_kind_by_rows_and_context(stand_in: StandIn) -> None:
    """What `Times` reads; the layers choose as before, and their caches are as empty."""
    layers = [layer(12), layer(None), layer(None), SimpleNamespace()]
    measured = measure(layers, stand_in)
    cells = [
        {"rows": rows, "context": context, "triton": 20.0, "fa4": rows}
        for rows in (8, 24)
        for context in (0, 16, 64)
    ]
    assert measured == [{"head_size": D, "num_heads": HQ, "has_window": False, "ms": cells}]
    kind = layers[1].impl.kind
    choice = Times("this", measured).choose(kind, 80)
    assert choice == Choice(((0, "fa4"), (12, "triton")))
    assert measuring.describe_gains(measured) == [
        f"FlashAttention-4 at head size {D} 0.83 to 2.50 times as fast as Triton"
    ]
    assert layers[1].impl.choice == TRITON and not layers[1].kv_cache.any()


def test_a_wrong_version_gets_no_time(stand_in: StandIn) -> None:
    stand_in.attend = lambda out, **_: out.fill_(1)  # type: ignore[method-assign]
    one = layer(None)
    (measured,) = measure([one], stand_in)
    assert all("fa4" not in cell for cell in measured["ms"])
    assert measuring.describe_gains([measured]) == []
    choice = Times("this", [measured]).choose(one.impl.kind, 80)
    assert choice == TRITON


def test_nothing_longer_than_a_request(stand_in: StandIn) -> None:
    (measured,) = measure([layer(None)], stand_in, longest=30)
    assert {cell["context"] for cell in measured["ms"]} == {0, 16}

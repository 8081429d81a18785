"""On a GPU: which steps are captured, and how many requests run at once."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.config.vllm import OptimizationLevel

from vllm_dllm.config.step_sizes import capture_sizes
from vllm_dllm.serving_config import sizes


@pytest.fixture
def on_h100(
    monkeypatch: pytest.MonkeyPatch, logged: Callable[..., list[str]]
) -> Callable[..., Any]:
    """The 26B model's settings as vLLM leaves them on an H100, adjusted; and the log's lines."""
    platform = SimpleNamespace(is_cuda_alike=lambda: True)
    monkeypatch.setattr(sizes, "current_platform", platform)
    log = logged(sizes, "info")

    def choose(max_num_seqs: int | None = None, **options: Any) -> tuple[Any, str]:
        text = SimpleNamespace(hidden_size=2816, vocab_size=262_144)
        graphs = dict(
            cudagraph_capture_sizes=None, max_cudagraph_capture_size=None, cudagraph_mode=None
        )
        config: Any = SimpleNamespace(
            diffusion_config=SimpleNamespace(canvas_length=256),
            model_config=SimpleNamespace(
                hf_text_config=text,
                dtype=torch.bfloat16,
                enforce_eager=options.pop("enforce_eager", False),
            ),
            optimization_level=options.pop("optimization_level", OptimizationLevel.O2),
            quant_config=None,
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            scheduler_config=SimpleNamespace(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=options.pop("max_num_batched_tokens", 8192),
            ),
            compilation_config=SimpleNamespace(**graphs | options),
        )
        if max_num_seqs is None:
            most = sizes.default_max_num_seqs(config)
            config.scheduler_config.max_num_seqs = most
        sizes.log_capacity(config, sizes.choose_capture_sizes(config))
        return config, log[-1]

    return choose


def test_a_gpu_serves_as_many_requests_as_a_step_has_room_for(on_h100: Callable[..., Any]) -> None:
    config, line = on_h100()
    assert config.scheduler_config.max_num_seqs == 24
    assert line.startswith(
        "Serving at most 24 requests at once: a step of 8192 tokens has room for 32 canvases of "
        "256, 2048 tokens are left to prompts. CUDA graphs for steps of 64, 128, 192, 256, 320, "
    )
    assert on_h100(max_num_batched_tokens=32_768)[0].scheduler_config.max_num_seqs == 96


def test_whole_canvases_are_captured(on_h100: Callable[..., Any]) -> None:
    config, _ = on_h100()
    sizes = config.compilation_config.cudagraph_capture_sizes
    assert {256 * n for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)} <= set(sizes)
    assert all(size % 64 == 0 for size in sizes) and max(sizes) == 4096
    assert all(size % 256 == 0 for size in sizes if size > 1024)


@pytest.mark.parametrize(
    ("canvas_length", "max_num_seqs", "budget", "sizes"),
    [
        (256, 1, 8192, [64, 128, 192, 256, 320, 384, 448]),
        (256, 24, 600, [64, 128, 192, 256, 320, 384, 448, 512]),
        (30, 2, 8192, [8, 16, 24, 30, 32, 40, 48, 56, 60]),
        (64, 11, 512, [*range(16, 256, 16), 256, 320, 384, 448, 512]),
    ],
)
def test_no_step_is_captured_that_never_comes(
    canvas_length: int, max_num_seqs: int, budget: int, sizes: list[int]
) -> None:
    assert capture_sizes(canvas_length, max_num_seqs, budget) == sizes


@pytest.mark.parametrize(
    "settings",
    [
        {"cudagraph_capture_sizes": [1, 2]},
        {"max_cudagraph_capture_size": 512},
        {"cudagraph_mode": CUDAGraphMode.NONE},
        {"enforce_eager": True},
        {"optimization_level": OptimizationLevel.O0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_the_user_said_of_graphs_stays(
    on_h100: Callable[..., Any], settings: dict[str, Any]
) -> None:
    config, line = on_h100(**settings)
    expected = settings.get("cudagraph_capture_sizes")
    assert config.compilation_config.cudagraph_capture_sizes == expected
    is_on = settings.keys() & {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
    assert line.endswith("CUDA graphs as configured." if is_on else "CUDA graphs are off.")


def test_more_requests_than_a_step_holds_are_said_to_wait(on_h100: Callable[..., Any]) -> None:
    config, line = on_h100(max_num_seqs=64)
    assert config.scheduler_config.max_num_seqs == 64
    assert "the others wait (--max-num-batched-tokens 16384 has room for all)" in line

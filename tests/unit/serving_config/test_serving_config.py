"""The scheduler and the worker of a diffusion model, named before vLLM has settled how they run; on
a GPU, which steps are captured, and how many requests run at once."""

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.config.vllm import OptimizationLevel
from vllm.platforms import Platform
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from tests.unit.serving_config.conftest import Configure
from vllm_dllm import serving_config
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.masked import MaskedConfig
from vllm_dllm.config.step_sizes import capture_sizes
from vllm_dllm.config.workers import CPU_WORKER, GPU_WORKER
from vllm_dllm.scheduling import scheduler
from vllm_dllm.scheduling.spared_forwards import joins_commits
from vllm_dllm.serving_config import sizes


@pytest.mark.parametrize("is_async", [False, True], ids=["waiting", "asynchronous"])
def test_the_scheduler_is_picked_by_the_process_that_makes_it(
    configure: Configure, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = pickle.loads(pickle.dumps(configure()))
    sent.scheduler_config.async_scheduling = is_async
    make = sent.scheduler_config.get_scheduler_cls()
    for name in ("CanvasScheduler", "CanvasAsyncScheduler"):
        stand_in = type(name, (SimpleNamespace,), {"__init__": lambda self, *args, **kwargs: None})
        monkeypatch.setattr(scheduler, name, stand_in)
    made = make(vllm_config=sent, log_stats=False)
    assert type(made).__name__ == ("CanvasAsyncScheduler" if is_async else "CanvasScheduler")


@pytest.mark.parametrize(("budget", "warms_up"), [(32, False), (33, True)])
def test_a_step_without_room_for_warm_up_requests(
    configure: Configure, budget: int, warms_up: bool
) -> None:
    config = configure(max_num_batched_tokens=budget, max_num_seqs=1)
    config.kernel_config.enable_jit_warmup = True  # vLLM turns it off where steps are not compiled
    extension = ExtensionConfig.from_additional_config(config.additional_config)
    serving_config.finish_config(config, extension)
    assert config.kernel_config.enable_jit_warmup == warms_up


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"max_num_batched_tokens": 16, "max_num_seqs": 1}, "Raise it or leave it out"),
        ({"diffusion_config": {"canvas_length": 100_000}}, "Raise it, or lower canvas_length in"),
    ],
)
def test_advice_about_a_canvas_that_is_too_long_for_a_step(
    configure: Configure, options: dict[str, Any], remedy: str
) -> None:
    """The default cannot be left out."""
    with pytest.raises(ValueError, match=rf"max_num_batched_tokens must .* one piece\. {remedy}"):
        configure(**options)


def test_what_the_user_names_stays(configure: Configure) -> None:
    stock = "vllm.v1.core.sched.diffusion_scheduler.DiffusionScheduler"
    config = configure(scheduler_cls=stock, worker_cls="my.Worker")
    assert config.scheduler_config.scheduler_cls == stock
    assert config.parallel_config.worker_cls == "my.Worker"


def test_compiled_graphs_do_not_depend_on_the_scheduler(configure: Configure) -> None:
    stock = "vllm.v1.core.sched.diffusion_scheduler.DiffusionScheduler"
    assert configure().compute_hash() == configure(scheduler_cls=stock).compute_hash()


@pytest.mark.parametrize(("block_length", "page"), [(4, 128), (32, 128), (24, 384)])
def test_cached_pages_hold_whole_blocks(masked: Configure, block_length: int, page: int) -> None:
    """Whose user named no --block-size."""
    config = masked(hf_overrides={"block_size": block_length})
    assert config.cache_config.block_size == page


@pytest.mark.parametrize(("block_length", "page"), [(4, 16), (32, 32), (24, 48)])
def test_cached_pages_hold_whole_blocks_on_gpus(
    masked: Configure, block_length: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks the attention backends once the model is loaded, unless the user has spoken."""
    monkeypatch.setattr(serving_config.current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(serving_config, "set_attention_backend", lambda config: None)
    monkeypatch.setattr(
        serving_config.current_platform, "check_and_update_config", lambda config: None
    )
    config = masked(hf_overrides={"block_size": block_length})
    monkeypatch.setattr(Platform, "_find_non_ssm_backends", lambda _: [TritonAttentionBackend])
    Platform.update_block_size_for_backend(config)
    assert config.cache_config.block_size == page


@pytest.mark.parametrize(
    ("options", "length"), [(None, 4), ({}, 4), ({"canvas_length": 8}, 8)], ids=str
)
def test_a_canvas_is_the_blocks_in_flight(
    masked: Configure, options: dict[str, int] | None, length: int
) -> None:
    """Of the checkpoint's length, or of the one that the user names."""
    settings = {"vllm_dllm": {"blocks_in_flight": 3}}
    config = masked(diffusion_config=options, additional_config=settings)
    found = MaskedConfig.from_vllm_config(config)
    assert config.diffusion_config.canvas_length == 3 * length
    assert (found.block_length, found.blocks_in_flight) == (length, 3)


def test_cpus_read_a_cache_of_the_model_s_type(configure: Configure, masked: Configure) -> None:
    """Models that vLLM's own kernels compute may have another."""
    two_blocks = {"vllm_dllm": {"blocks_in_flight": 2}}
    for ours, options in ((configure, {}), (masked, {"additional_config": two_blocks})):
        with pytest.raises(ValueError, match="kv_cache_dtype must be auto on a CPU, got 'fp8'"):
            ours(kv_cache_dtype="fp8", **options)
    assert masked(kv_cache_dtype="fp8").cache_config.cache_dtype == "fp8"
    for create in (configure, masked):  # the model's own, by name
        config = create(dtype="bfloat16", kv_cache_dtype="bfloat16")
        assert config.cache_config.cache_dtype == "bfloat16"
    for dtype in ("float16", "int8_per_token_head"):  # vLLM's CPU attention would misread them
        with pytest.raises(ValueError, match=f"must be auto or fp8 on a CPU, got '{dtype}'"):
            masked(kv_cache_dtype=dtype)


def test_steps_without_a_canvas_length(configure: Configure) -> None:
    config = configure(diffusion_config={"max_denoising_steps": 2}).diffusion_config
    assert (config.canvas_length, config.max_denoising_steps) == (32, 2)


def config_with(worker_cls: str) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=worker_cls),
        scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=False),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        kv_transfer_config=None,
    )


@pytest.mark.parametrize(("is_gpu", "worker"), [(True, GPU_WORKER), (False, "auto")])
def test_gpus_get_our_worker(is_gpu: bool, worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cuda_alike=lambda: is_gpu)
    monkeypatch.setattr(serving_config, "current_platform", platform)
    config = config_with("auto")
    serving_config.set_scheduler_and_worker(config)
    assert config.parallel_config.worker_cls == worker


@pytest.mark.parametrize(
    ("worker", "joins"),
    [(GPU_WORKER, True), (CPU_WORKER, True), ("vllm.v1.worker.gpu_worker.Worker", False)],
)
def test_other_workers_commit_each_block_by_itself(worker: str, joins: bool) -> None:
    assert joins_commits(config_with(worker)) is joins


def test_requests_in_flight_get_some_time_unless_the_user_says_how_much(
    configure: Configure,
) -> None:
    assert configure().shutdown_timeout == 15
    settings = {"vllm_dllm": {"drain_seconds": 7}}
    assert configure(additional_config=settings).shutdown_timeout == 7
    assert configure(additional_config=settings, shutdown_timeout=40).shutdown_timeout == 40


@pytest.mark.parametrize(
    ("budget", "longest", "most"),
    [(8192, 262_144, 0), (10_240, 262_144, 8192), (10_240, 4096, 0)],
    ids=["vLLM's", "larger", "short prompts"],
)
def test_a_larger_budget_makes_no_longer_chunks_on_gpus(
    monkeypatch: pytest.MonkeyPatch, budget: int, longest: int, most: int
) -> None:
    """Of one prompt: the rest of a step is for canvases and for other prompts."""
    monkeypatch.setattr(serving_config, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    scheduler_config = SimpleNamespace(
        max_num_batched_tokens=budget, long_prefill_token_threshold=0
    )
    config: Any = SimpleNamespace(
        diffusion_config=SimpleNamespace(canvas_length=256),
        model_config=SimpleNamespace(max_model_len=longest),
        scheduler_config=scheduler_config,
    )
    serving_config.limit_prompt_chunks(config)
    assert scheduler_config.long_prefill_token_threshold == most


def test_prompts_leave_room_on_cpus_unless_the_user_says_how_much(configure: Configure) -> None:
    config = configure()
    assert config.diffusion_config is not None
    canvas_length = config.diffusion_config.canvas_length
    assert config.scheduler_config.long_prefill_token_threshold == 4 * canvas_length
    own = configure(long_prefill_token_threshold=600)
    assert own.scheduler_config.long_prefill_token_threshold == 600


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

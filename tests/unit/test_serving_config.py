"""The scheduler and the worker of a diffusion model, named before vLLM has settled how they run."""

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_dllm import plugin, serving_config
from vllm_dllm.config.workers import CPU_WORKER, GPU_WORKER
from vllm_dllm.scheduling import scheduler
from vllm_dllm.scheduling.spared_forwards import joins_commits
from vllm_dllm.step.worker import CanvasWorker
from vllm_dllm.tools.pretrain.tiny import make_tiny_checkpoint

Configure = Callable[..., VllmConfig]


@pytest.fixture(scope="module")
def configure(tmp_path_factory: pytest.TempPathFactory) -> Configure:
    plugin.register()
    checkpoint = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), vision=False)

    def create(**options: Any) -> VllmConfig:
        return EngineArgs(str(checkpoint), enforce_eager=True, **options).create_engine_config()

    return create


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


def test_what_the_user_names_stays(configure: Configure) -> None:
    stock = "vllm.v1.core.sched.diffusion_scheduler.DiffusionScheduler"
    config = configure(scheduler_cls=stock, worker_cls="my.Worker")
    assert config.scheduler_config.scheduler_cls == stock
    assert config.parallel_config.worker_cls == "my.Worker"


def test_compiled_graphs_do_not_depend_on_the_scheduler(configure: Configure) -> None:
    stock = "vllm.v1.core.sched.diffusion_scheduler.DiffusionScheduler"
    assert configure().compute_hash() == configure(scheduler_cls=stock).compute_hash()


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
    serving_config.use_our_classes(config)
    assert config.parallel_config.worker_cls == worker


@pytest.mark.parametrize(
    ("worker", "joins"),
    [(GPU_WORKER, True), (CPU_WORKER, True), ("vllm.v1.worker.gpu_worker.Worker", False)],
)
def test_other_workers_commit_each_block_by_itself(worker: str, joins: bool) -> None:
    assert joins_commits(config_with(worker)) is joins


def test_the_gpu_worker_prefills_what_was_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    module = "vllm_dllm.step.worker"
    monkeypatch.setattr(f"{module}.prefill_emitted_tokens", lambda *_: calls.append("prefill"))
    monkeypatch.setattr(f"{module}.Worker.execute_model", lambda *_: calls.append("execute"))
    worker = CanvasWorker.__new__(CanvasWorker)
    worker.model_runner = SimpleNamespace()
    worker.execute_model(SimpleNamespace())
    assert calls == ["prefill", "execute"]


def test_requests_in_flight_get_some_time_unless_the_user_says_how_much(
    configure: Configure,
) -> None:
    assert configure().shutdown_timeout == 15
    settings = {"vllm_dllm": {"drain_seconds": 7}}
    assert configure(additional_config=settings).shutdown_timeout == 7
    assert configure(additional_config=settings, shutdown_timeout=40).shutdown_timeout == 40


def test_prompts_leave_room_on_cpus_unless_the_user_says_how_much(configure: Configure) -> None:
    config = configure()
    assert config.diffusion_config is not None
    canvas_length = config.diffusion_config.canvas_length
    assert config.scheduler_config.long_prefill_token_threshold == 4 * canvas_length
    own = configure(long_prefill_token_threshold=600)
    assert own.scheduler_config.long_prefill_token_threshold == 600

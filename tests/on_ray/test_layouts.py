"""Tensor parallelism with Ray as executor, and Ray Serve LLM: answers are those of one process.

`make test-ray` runs them, in an environment of their own that has Ray.
"""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.paths import CHECKPOINTS, ROOT
from vllm_dllm.tools.server_process import HOST, Server, choose_port, serve_command

CHECKPOINT = CHECKPOINTS / "diffusiongemma-tiny"
PLATFORM = Path(__file__).parent / "platform"
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 1 << 28,
    "diffusion_config": {"canvas_length": 64},
    "enforce_eager": True,
}
PROMPTS = ("Sort: q d x a", "Add 23 and 41.", "Reverse: rose chair lamp", "Count from 31 to 69.")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster of this machine, which believes that there are two GPUs; gives its address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")  # its ports are open to other machines
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("PYTHONPATH", f"{PLATFORM}:{ROOT}")  # of all its workers
        import ray  # reads how it authenticates when it is imported

        running = ray.init(
            num_cpus=4, num_gpus=2, include_dashboard=False, object_store_memory=100 << 20
        )
        patch.setenv("RAY_ADDRESS", running.address_info["gcs_address"])
        yield running.address_info["gcs_address"]
        ray.shutdown()


def answers(port: int) -> list[str]:
    client = openai.OpenAI(base_url=f"http://{HOST}:{port}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    found = []
    for number, prompt in enumerate(PROMPTS):
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], seed=number, max_tokens=128
        )
        found.append(str(answer.choices[0].message.content))
    return found


def serving(log: Path, **options: Any) -> list[str]:
    """What `vllm serve` answers."""
    command = []
    for name, value in (OPTIONS | options).items():
        command += [f"--{name.replace('_', '-')}"]
        if value is not True:
            command += [str(value).replace("'", '"')]
    port = choose_port(None)
    with Server(serve_command(CHECKPOINT, port, *command), port, log) as server:
        server.wait_until_ready(lambda seconds: None)
        return answers(port)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return serving(tmp_path_factory.mktemp("one") / "server.log")


def test_ray_as_executor(
    cluster: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    log = tmp_path / "server.log"
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    assert serving(log, **parallel) == expected
    assert "RayWorkerProc" in log.read_text()


def test_ray_serve(cluster: str, expected: list[str]) -> None:
    """One replica, on a CPU, with the package in its runtime environment."""
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    port = choose_port(None)
    serve.start(http_options={"host": HOST, "port": port})
    config = LLMConfig(
        model_loading_config={"model_id": "tiny", "model_source": str(CHECKPOINT)},
        deployment_config={"num_replicas": 1},
        accelerator_config={"kind": "cpu"},
        engine_kwargs=OPTIONS,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    try:
        serve.run(build_openai_app({"llm_configs": [config]}))
        assert answers(port) == expected
    finally:
        serve.shutdown()

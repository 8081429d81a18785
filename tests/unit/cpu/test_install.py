"""When this machine's runner is ours, and what is set for it."""

import os
import re
from types import SimpleNamespace

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from attention_kernels.interpreter import interpret_language
from tests.paths import CHECKPOINTS
from vllm_dllm import plugin
from vllm_dllm.config.workers import SHORT_SPINS
from vllm_dllm.cpu import install
from vllm_dllm.cpu.compat import runner

OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
OURS = "vllm_dllm.cpu.worker.TritonFreeCPUWorker"


@pytest.fixture
def no_openmp_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPENMP:
        monkeypatch.setenv(name, "")  # so that the test's end restores it
        monkeypatch.delenv(name)


def test_a_machine_whose_vllm_has_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "has_triton", lambda: True)
    monkeypatch.setattr(runner, "allow_v2_runner_without_triton", None)
    install.install()


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", ("", "0", "40"), ("lots", "4G", "1.5", "-1")),
        (
            "VLLM_CPU_OMP_THREADS_BIND",
            ("", "auto", "nobind", "3", "0-3,6|7, 9-11"),
            ("lots", "0-", "0|", "0;1", "Auto"),
        ),
    ],
)
def test_variables_that_vllm_cannot_read(
    name: str, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    for value in right:
        install.check_variables({name: value})
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{name} must be .*, got '{re.escape(value)}'"):
            install.check_variables({name: value})


def config_with_worker(worker_cls: str) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=worker_cls, enable_batch_sharded_sampling=True),
        kernel_config=SimpleNamespace(enable_jit_warmup=True),
        speculative_config=None,
    )


def test_targets_with_recurrent_layers_are_not_drafted_for() -> None:
    config = config_with_worker("any")
    config.speculative_config, config.model_config = True, SimpleNamespace(is_hybrid=True)
    with pytest.raises(ValueError, match="with recurrent layers cannot have a drafter on a CPU"):
        install.prepare(config)


def test_prepare_replaces_only_vllms_own_worker(no_openmp_settings: None) -> None:
    stock, custom = map(config_with_worker, (runner.STOCK_CPU_WORKER, "my.Worker"))
    install.prepare(stock)
    install.prepare(custom)
    assert stock.parallel_config.worker_cls == OURS
    assert custom.parallel_config.worker_cls == "my.Worker"
    assert not stock.kernel_config.enable_jit_warmup  # its requests would be no canvases
    assert not stock.parallel_config.enable_batch_sharded_sampling  # a step would end the engine


def test_waiting_threads_sleep_soon(no_openmp_settings: None) -> None:
    install.prepare(config_with_worker("any"))
    found = {name: os.environ.get(name) for name in OPENMP}
    assert found == {"OMP_WAIT_POLICY": None, **SHORT_SPINS}


@pytest.mark.parametrize("setting", OPENMP)
def test_prepare_keeps_the_users_openmp_settings(
    setting: str, no_openmp_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting, "active")
    install.prepare(config_with_worker("any"))
    assert [name for name in OPENMP if name in os.environ] == [setting]


def configuration() -> VllmConfig:
    plugin.register()
    checkpoint = str(CHECKPOINTS / "diffusiongemma-tiny")
    return EngineArgs(checkpoint, enforce_eager=True).create_engine_config()


def test_a_diffusion_model_gets_runner_v2(
    no_openmp_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    config = configuration()
    assert config.use_v2_model_runner
    assert config.parallel_config.worker_cls == OURS


def test_a_user_who_asks_for_runner_v1_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="Model Runner V1 does not support: diffusion models"):
        configuration()


def test_interpreting_a_kernel_is_this_processs_own_affair() -> None:
    interpret_language()
    assert "TRITON_INTERPRET" not in os.environ

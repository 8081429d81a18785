"""DiffusionGemma as it is built for one GPU: its experts beside its dense MLP."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from vllm_dllm.compat import concurrent_experts, row_reductions
from vllm_dllm.compat.concurrent_experts import IN_ORDER, ConcurrentLayer
from vllm_dllm.measured import folder

OF_A_USER = {"max_autotune": True}


@pytest.fixture
def config(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """Of a server that compiles."""
    found = EngineArgs(
        str(next(iter(checkpoints.values()))),
        dtype="float32",
        max_model_len=1024,
        skip_tokenizer_init=True,
        load_format="dummy",
    ).create_engine_config()
    found.compilation_config.mode = CompilationMode.VLLM_COMPILE
    found.compilation_config.inductor_compile_config.update(OF_A_USER)
    platform = SimpleNamespace(is_cuda=lambda: True)
    for module in (concurrent_experts, row_reductions):
        monkeypatch.setattr(module, "current_platform", platform)
    monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "0")  # which a CPU's platform sets
    return found


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings that compilers of models were built with. They keep a copy."""
    seen: list[dict[str, Any]] = []

    def build(config: CompilationConfig, *_: Any, **__: Any) -> str:
        seen.append(dict(config.inductor_compile_config))
        return "eager"

    monkeypatch.setattr(CompilationConfig, "init_backend", build)
    return seen


def build(config: VllmConfig) -> nn.Module:
    with set_current_vllm_config(config), torch.device("meta"):
        return initialize_model(config)


def test_the_compiler_is_told_before_it_copies_its_settings(
    config: VllmConfig, given: list[dict[str, Any]]
) -> None:
    model = build(config)
    layers = [m for m in model.modules() if isinstance(m, ConcurrentLayer)]
    assert len(layers) == config.model_config.hf_text_config.num_hidden_layers
    expected = IN_ORDER | {row_reductions.SETTING: row_reductions.RowsInRegisters} | OF_A_USER
    assert given and all(expected.items() <= each.items() for each in given)


def several_ranks(config: VllmConfig, _: pytest.MonkeyPatch) -> None:
    config.parallel_config.world_size = 2


def adapters(config: VllmConfig, _: pytest.MonkeyPatch) -> None:
    config.lora_config = LoRAConfig()


def experts_between_graphs(config: VllmConfig, _: pytest.MonkeyPatch) -> None:
    config.compilation_config.splitting_ops = ["vllm::moe_forward"]


def one_stream(_: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "1")


@pytest.mark.parametrize(
    "change",
    [several_ranks, adapters, experts_between_graphs, one_stream],
    ids=lambda f: f.__name__,
)
def test_vllm_s_order_stays(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    change(config, monkeypatch)
    assert not concurrent_experts.allow_concurrent_experts(config)
    assert config.compilation_config.inductor_compile_config.keys().isdisjoint(IN_ORDER)


def test_measurements_have_one_folder_before_and_after_the_model_is_built(
    config: VllmConfig, given: list[dict[str, Any]]
) -> None:
    before = folder.result_folder(config)
    build(config)
    assert folder.result_folder(config) == before

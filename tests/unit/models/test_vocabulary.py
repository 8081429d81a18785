"""DiffusionGemma as it is built for GPUs: its experts beside its dense MLP, whether its vocabulary
is read tile by tile, and what ranks exchange that share it."""

import json
from collections.abc import Callable
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

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.unit.models.building import build
from vllm_dllm.compat import concurrent_experts, row_reductions
from vllm_dllm.compat.concurrent_experts import IN_ORDER, ConcurrentLayer
from vllm_dllm.measured import folder
from vllm_dllm.models import vocabulary
from vllm_dllm.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion
from vllm_dllm.models.masked import MaskedModel


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def said(logged: Callable[..., list[str]]) -> list[str]:
    return logged(vocabulary)


def model_of(checkpoint: Path, vocab_size: int, is_tied: bool = True):
    """Without its weights' values."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["tie_word_embeddings"] = is_tied
    config["text_config"] |= {"vocab_size": vocab_size, "tie_word_embeddings": is_tied}
    path.write_text(json.dumps(config))
    return build(checkpoint, "meta")[0]


@pytest.mark.parametrize(
    "vocab_size", [262_208, 262_144, 151_936, 128_256, 50_257, 32_000, 20_000, 16_384]
)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_every_large_vocabulary_is_streamed(
    checkpoint: Path, said: list[str], vocab_size: int, is_tied: bool
) -> None:
    model = model_of(checkpoint, vocab_size, is_tied)
    assert model.streams_vocabulary and not said
    assert len(model.lm_head_shard()) == vocab_size


def test_a_small_one_is_not(checkpoint: Path, said: list[str]) -> None:
    assert not model_of(checkpoint, 16_383).streams_vocabulary and not said


@pytest.mark.parametrize(("vocab_size", "streams"), [(262_144, True), (262_208, False)])
def test_shards_begin_at_blocks_or_the_log_says_so(
    checkpoint: Path,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    vocab_size: int,
    streams: bool,
) -> None:
    model = model_of(checkpoint, vocab_size)
    monkeypatch.setattr(vocabulary, "get_tp_group", lambda: SimpleNamespace(world_size=2))
    assert model.streams_vocabulary == streams
    if not streams:
        (line,) = said
        assert "`sampling_memory_mib` does not bound: 2 tensor-parallel ranks share 262208" in line


@pytest.mark.parametrize("model", [DiffusionGemmaForBlockDiffusion, MaskedModel])
def test_a_step_without_canvases_leaves_the_head_alone(model: type) -> None:
    """Nothing here has a head."""
    of_model = SimpleNamespace(
        config=SimpleNamespace(vocab_size=512), sampler_reads_hidden_states=lambda: False
    )
    logits = model.compute_logits(of_model, torch.zeros(0, 8, dtype=torch.bfloat16))
    assert logits.shape == (0, 512) and logits.dtype is torch.float32


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

    def build_to_compile(config: CompilationConfig, *_: Any, **__: Any) -> str:
        seen.append(dict(config.inductor_compile_config))
        return "eager"

    monkeypatch.setattr(CompilationConfig, "init_backend", build_to_compile)
    return seen


def build_to_compile(config: VllmConfig) -> nn.Module:
    with set_current_vllm_config(config), torch.device("meta"):
        return initialize_model(config)


def test_the_compiler_is_told_before_it_copies_its_settings(
    config: VllmConfig, given: list[dict[str, Any]]
) -> None:
    model = build_to_compile(config)
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
    build_to_compile(config)
    assert folder.result_folder(config) == before

"""Which attention a server on a GPU chooses at its start, and what its log says of it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import AttentionConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import vllm_dllm.attention.flash_attention
import vllm_dllm.attention.gpu
from vllm_dllm import serving_config
from vllm_dllm.attention.choice import Choice, LayerKind
from vllm_dllm.attention.gpu import choose_versions
from vllm_dllm.measured import folder

Chosen = Callable[..., tuple[str, bool]]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, logged: Callable[..., list[str]]) -> Chosen:
    """What the log says of a kind of layer, and whether FlashAttention-4 is part of it."""
    log = logged(vllm_dllm.attention.gpu, "info_once")

    def choose(
        layer: LayerKind, version: int | None = None, cache: str = "auto", chip: Any = (9, 0)
    ) -> tuple[str, bool]:
        config = SimpleNamespace(
            attention_config=AttentionConfig(flash_attn_version=version),
            model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=32768),
            additional_config={},
        )
        gpu, flash_attention = vllm_dllm.attention.gpu, vllm_dllm.attention.flash_attention
        monkeypatch.setattr(gpu, "get_current_vllm_config_or_none", lambda: config)
        platform = SimpleNamespace(get_device_capability=lambda: DeviceCapability(*chip))
        monkeypatch.setattr(gpu, "current_platform", platform)
        monkeypatch.setattr(flash_attention, "current_platform", platform)
        choice, attention = choose_versions(layer, cache)
        assert (attention is None) == (choice == Choice(((0, "triton"),)))
        return log[-1], attention is not None

    return choose


SLIDING, FULL = LayerKind(256, 16, has_window=True), LayerKind(512, 16, has_window=False)


@pytest.mark.fa4
def test_a_line_of_the_log_for_each_kind_of_layer(
    monkeypatch: pytest.MonkeyPatch, chosen: Chosen
) -> None:
    module = vllm_dllm.attention.flash_attention
    monkeypatch.setattr(module, "flash_attention_4", lambda: lambda **_: None)
    assert chosen(SLIDING) == (
        "Attention layers of head size 256 with a window run FlashAttention-4 (measured on an "
        "NVIDIA H200).",
        True,
    )
    line, has_fa4 = chosen(FULL)
    assert "512 without a window run FlashAttention-4 (measured" in line and has_fa4
    line, has_fa4 = chosen(SLIDING, version=4)
    assert "run FlashAttention-4 (--attention-config.flash_attn_version 4)" in line and has_fa4
    for choose, why in (
        (lambda: chosen(SLIDING, version=3), "asks for no FlashAttention-4"),
        (lambda: chosen(FULL, cache="fp8"), "it takes a key_cache of the query's dtype"),
        (lambda: chosen(FULL, cache="float16"), "got torch.float16"),
        (lambda: chosen(FULL._replace(has_window=True), version=4), "got query with 512"),
        (lambda: chosen(FULL, chip=(10, 0)), "no measured times"),
        (lambda: chosen(FULL, version=4, chip=(10, 0)), "got query with 512"),
        (lambda: chosen(SLIDING, version=4, chip=(8, 0)), "got sm_80"),
    ):
        line, has_fa4 = choose()
        assert "run Triton (" in line and why in line and not has_fa4


@pytest.mark.fa4
def test_a_build_without_flash_attention_4_runs_triton(chosen: Chosen) -> None:
    """As the CPU's."""
    line, has_fa4 = chosen(FULL)
    assert "run Triton (not FlashAttention-4: it is not there: " in line and not has_fa4


Serve = Callable[[AttentionConfig], list[str]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, logged: Callable[..., list[str]]) -> Serve:
    """Starts a server on a GPU that ours can serve, as far as attention goes; what it logs."""
    log = logged(serving_config, "info")

    def stock(vllm_config: Any) -> None:
        vllm_config.attention_config.flash_attn_version = 4

    monkeypatch.setattr(
        serving_config.DiffusionGemmaModelForBlockDiffusionConfig,
        "verify_and_update_config",
        staticmethod(stock),
    )
    monkeypatch.setattr(serving_config, "gpu_backend", lambda _: AttentionBackendEnum.CUSTOM)
    gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda_alike=lambda: True)
    monkeypatch.setattr(serving_config, "current_platform", gpu)
    for owner, name in (
        (serving_config, "fill_in_canvas_length"),
        (serving_config, "set_scheduler_and_worker"),
        (serving_config, "limit_prompt_chunks"),
        (serving_config.checks, "check_use"),
        (serving_config.checks, "check_token_budget"),
        (serving_config.checks, "check_overrides"),
        (serving_config, "read_denoise_config"),
        (serving_config.num_requests, "default_max_num_seqs"),
        (serving_config.cuda_graphs, "choose_capture_sizes"),
        (serving_config.cuda_graphs, "log_capacity"),
        (serving_config, "finish_config"),
    ):
        monkeypatch.setattr(owner, name, lambda *_: 8)

    def start(attention_config: AttentionConfig) -> list[str]:
        config = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=None, supports_multimodal_inputs=False),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            attention_config=attention_config,
            additional_config={},
        )
        serving_config.DiffusionGemmaServingConfig.verify_and_update_config(config)
        return log

    return start


@pytest.mark.parametrize("version", [None, 4])
def test_only_a_user_asks_for_flash_attention_4(serve: Serve, version: int | None) -> None:
    """Stock vLLM sets version 4 by itself for models whose layers differ in head size."""
    attention_config = AttentionConfig(flash_attn_version=version)
    serve(attention_config)
    assert attention_config.backend is AttentionBackendEnum.CUSTOM
    assert attention_config.flash_attn_version == version


def test_the_log_says_which_attention_was_chosen(serve: Serve) -> None:
    (line,) = serve(AttentionConfig())
    assert line.startswith("Attention runs our kernels (--attention-backend CUSTOM)")


def test_the_log_claims_no_choice_of_the_users(serve: Serve) -> None:
    attention_config = AttentionConfig(backend=AttentionBackendEnum.TRITON_ATTN)
    assert serve(attention_config) == []
    assert attention_config.backend is AttentionBackendEnum.TRITON_ATTN


def test_kernel_choice_says_whose_times_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`measured` takes what is shipped until something has been measured."""
    gpu = vllm_dllm.attention.gpu
    platform = SimpleNamespace(get_device_capability=lambda: DeviceCapability(9, 0))
    monkeypatch.setattr(gpu, "current_platform", platform)
    monkeypatch.setattr(folder, "result_folder", lambda _: tmp_path)

    def known(choice: str) -> list[str]:
        section = {"vllm_dllm": {"kernel_choice": choice}}
        found = gpu.load_times(SimpleNamespace(additional_config=section))
        return [times.gpu for times in found]

    assert (known("stock"), known("shipped"), known("measured")) == ([], *2 * [["NVIDIA H200"]])
    folder.write_json(tmp_path, folder.RESULT, {"gpu": "this GPU", "layers": []})
    assert (known("stock"), known("shipped")) == ([], ["NVIDIA H200"])
    assert known("measured") == ["this GPU", "NVIDIA H200"], "of kinds that it did not get to"

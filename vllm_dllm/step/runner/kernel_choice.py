"""Measures kernels on this GPU where the server is told to, once for all starts on the machine."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dllm.attention import measure as attention
from vllm_dllm.attention.gpu import GpuCanvasImpl
from vllm_dllm.compat.experts import clear_tiles_cache
from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.config.extension import ExtensionConfig
from vllm_dllm.config.tiles import VARIABLE
from vllm_dllm.measured import few_rows, folder, tiles
from vllm_dllm.measured.stopwatch import Clock, Stopwatch, gpu_clock

logger = init_logger(__name__)

MOST_SECONDS = 15.0
CANVASES = (1, 8, 32)  # of the steps that are timed


def measure_kernels(
    vllm_config: VllmConfig, model: torch.nn.Module, clock: Clock = gpu_clock
) -> None:
    """Comes after the cache is there and before graphs are captured. The first rank measures,
    unless an earlier start did, and all take what it found."""
    extension = ExtensionConfig.from_additional_config(vllm_config.additional_config)
    if extension.kernel_choice != "measured":
        return
    path, ranks = folder.result_folder(vllm_config), get_tp_group()
    known = found = folder.read_result(path)
    if ranks.is_first_rank and known is None:
        found = _measure(vllm_config, model, path, clock)
    found = ranks.broadcast_object(found)
    if found != known and not _keep(found, path):
        return
    with set_current_vllm_config(vllm_config):
        if found != known:  # else they have read it
            for layer in _layers(vllm_config):
                if isinstance(getattr(layer, "impl", None), GpuCanvasImpl):
                    layer.impl.choose_version()
        few_rows.install_kernels(model.modules(), found["ours"])


def _keep(found: dict[str, Any], path: Path) -> bool:
    """Writes it where attention and vLLM look for it; False, with a warning: no file can be."""
    try:
        for file, table in found["tiles"].items():
            folder.write_json(path, file, table)
        folder.write_json(path, folder.RESULT, found)
    except OSError as error:
        logger.warning("Cannot keep what was measured in %s: %s. It is not used.", path, error)
        return False
    clear_tiles_cache()
    return True


def _measure(
    vllm_config: VllmConfig, model: torch.nn.Module, path: Path, clock: Clock
) -> dict[str, Any]:
    """Returns what `Times.from_json` takes, with the tables of experts' tiles, and the steps that
    our experts compute."""
    assert vllm_config.diffusion_config is not None
    started = time.monotonic()
    stopwatch = Stopwatch.for_seconds(MOST_SECONDS, clock)
    length = vllm_config.diffusion_config.canvas_length
    most = vllm_config.scheduler_config.max_num_batched_tokens
    steps = [canvases for canvases in CANVASES if canvases * length <= most]
    layers: list[dict[str, Any]] = []
    tables: dict[str, tiles.Table] = {}
    ours: dict[str, few_rows.Sizes] = {}
    gains: list[str] = []
    # Blocks run Triton alone, and who asks for a version gets it.
    is_masked = vllm_config.model_config.architecture in FAMILIES
    if not is_masked and vllm_config.attention_config.flash_attn_version is None:
        with set_current_vllm_config(vllm_config):
            layers = attention.measure_attention(
                _layers(vllm_config),
                vllm_config.model_config.dtype,
                length,
                steps,
                vllm_config.model_config.max_model_len,
                stopwatch,
            )
    if os.environ.get(VARIABLE) == str(path):  # else vLLM looks where the user says
        rows = [n * length for n in steps]
        tables, ours, gains = tiles.measure_experts(model.modules(), rows, stopwatch)
    logger.info(
        "Kernels were timed in %.1f s%s: attention of %d kinds of layers, %s.",
        time.monotonic() - started,
        ", not all of them" if stopwatch.is_over else "",
        len(layers),
        "; ".join(gains) or "experts stay",
    )
    gpu = current_platform.get_device_name()
    return {"gpu": gpu, "layers": layers, "tiles": tables, "ours": ours}


def _layers(vllm_config: VllmConfig) -> list[Any]:
    return list(vllm_config.compilation_config.static_forward_context.values())

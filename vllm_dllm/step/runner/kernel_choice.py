"""Makes layers run the kernels that the setting `kernel_choice` asks for: those that were fastest
on such a GPU, or those that are on this one, timed once for all starts on the machine."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dllm.attention import measure as attention
from vllm_dllm.attention.gpu import GpuCanvasImpl
from vllm_dllm.compat.experts import clear_tiles_cache
from vllm_dllm.compat.fp8_linears import open_fp8_linears
from vllm_dllm.config.architectures import FAMILIES
from vllm_dllm.config.extension import ExtensionConfig, KernelChoice
from vllm_dllm.config.tiles import VARIABLE, may_replace_experts, shipped_block_sizes, shipped_tiles
from vllm_dllm.measured import expert_kernels, folder, fp8_linears
from vllm_dllm.measured.stopwatch import Clock, Stopwatch, gpu_clock

logger = init_logger(__name__)

MOST_SECONDS = 15.0  # of all measurements
CANVASES = (1, 8, 32)  # how many canvases the timed steps have


def prepare_choice(vllm_config: VllmConfig, model: torch.nn.Module) -> None:
    """Has `choose_kernels` choose those of FP8 linears, too, if kernels are to be measured. Must be
    called when the weights are loaded, before the model is compiled."""
    if _choice(vllm_config) == "measured":
        open_fp8_linears(model.modules())


def choose_kernels(
    vllm_config: VllmConfig, model: torch.nn.Module, clock: Clock = gpu_clock
) -> None:
    """Makes layers run the kernels that `kernel_choice` asks for. Must be called when the KV cache
    exists, before graphs are captured.

    - "shipped": experts run our kernel where `block_sizes.json` says so, unless the user chose
      otherwise (`may_replace_experts`).
    - "measured": the first rank times kernels, unless an earlier start stored its measurements, and
      all ranks use its measurements. Kernels that it had no time for stay as shipped.
    - "stock", and any value under `VLLM_BATCH_INVARIANT`: nothing changes.
    """
    choice = _choice(vllm_config)
    if choice == "stock":
        return
    if choice == "shipped":
        _install_experts(vllm_config, model, may_replace_experts(vllm_config), {}, [])
        return
    path, ranks = folder.result_folder(vllm_config), get_tp_group()
    stored = result = folder.read_result(path)
    if ranks.is_first_rank and stored is None:
        result = _measure(vllm_config, model, path, clock)
    result = ranks.broadcast_object(result)
    measured, linears = result["ours"], result["linears"]
    if result != stored:  # else layers have read it
        if _store(result, path):
            with set_current_vllm_config(vllm_config):
                for layer in _layers(vllm_config):
                    if isinstance(getattr(layer, "impl", None), GpuCanvasImpl):
                        layer.impl.choose_version()
        else:
            measured = linears = {}
    fp8_linears.use_kernels(linears)
    as_shipped = may_replace_experts(vllm_config, path)
    _install_experts(vllm_config, model, as_shipped, measured, result["rows"])


def _choice(vllm_config: VllmConfig) -> KernelChoice:
    """Returns the setting `kernel_choice`, or "stock" if steps must not depend on it."""
    if envs.VLLM_BATCH_INVARIANT:
        return "stock"
    return ExtensionConfig.from_additional_config(vllm_config.additional_config).kernel_choice


def _install_experts(
    vllm_config: VllmConfig,
    model: torch.nn.Module,
    as_shipped: bool,
    measured: expert_kernels.SizesOf,
    rows: list[int],
) -> None:
    """Makes experts run our kernel where it was faster on this GPU, by `measured`. Numbers of rows
    that are missing there run as `block_sizes.json` says if `as_shipped`. What is missing there,
    too, runs vLLM's kernel. `rows`: all that were to be measured."""
    sizes = dict(shipped_block_sizes()) if as_shipped else {}
    for file, fastest in measured.items():
        sizes[file] = (sizes.get(file) or {str(number): 0 for number in rows}) | fastest
    if sizes:
        with set_current_vllm_config(vllm_config):
            expert_kernels.install_kernels(model.modules(), sizes)


def _store(result: dict[str, Any], path: Path) -> bool:
    """Writes the measurements `result` where attention and vLLM look for them, and returns True. If
    they cannot be written, logs a warning and returns False."""
    try:
        for file, table in result["tiles"].items():
            folder.write_json(path, file, shipped_tiles(file) | table)
        folder.write_json(path, folder.RESULT, result)
    except OSError as error:
        logger.warning("Cannot keep what was measured in %s: %s. It is not used.", path, error)
        return False
    clear_tiles_cache()
    return True


def _measure(
    vllm_config: VllmConfig, model: torch.nn.Module, path: Path, clock: Clock
) -> dict[str, Any]:
    """Times attention, experts and FP8 linears for about `MOST_SECONDS` at most. Returns the JSON
    of `measured.json`: `gpu` and `layers` for `Times.from_json`, `rows` that were to be timed,
    `tiles` and `ours` as in `FastestExperts`, and `linears`, which are `fp8_linears.Kernels`."""
    assert vllm_config.diffusion_config is not None
    started = time.monotonic()
    stopwatch = Stopwatch(clock, started + MOST_SECONDS)
    length = vllm_config.diffusion_config.canvas_length
    most = vllm_config.scheduler_config.max_num_batched_tokens
    steps = [canvases for canvases in CANVASES if canvases * length <= most]
    rows = [canvases * length for canvases in steps]
    layers: list[dict[str, Any]] = []
    tables: dict[str, expert_kernels.Table] = {}
    ours: dict[str, expert_kernels.Sizes] = {}
    gains: list[str] = []
    # Masked models run Triton alone, and `flash_attn_version` is the user's choice.
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
    if os.environ.get(VARIABLE) == str(path):  # else vLLM reads tiles from the user's folder
        tables, ours, gains = expert_kernels.measure_experts(model.modules(), rows, stopwatch)
    linears, of_linears = fp8_linears.measure_fp8_linears(
        model.modules(), vllm_config.model_config.dtype, rows, stopwatch
    )
    logger.info(
        "Kernels were timed in %.1f s%s: %s; %s.",
        time.monotonic() - started,
        ", not all of them" if stopwatch.is_over else "",
        "; ".join(attention.describe_gains(layers)) or "attention not compared",
        "; ".join(gains + of_linears) or "experts and linears unchanged",
    )
    return {
        "gpu": current_platform.get_device_name(),
        "layers": layers,
        "rows": rows,
        "tiles": tables,
        "ours": ours,
        "linears": linears,
    }


def _layers(vllm_config: VllmConfig) -> list[Any]:
    """Returns all layers that vLLM has registered, among them attention layers."""
    return list(vllm_config.compilation_config.static_forward_context.values())

"""How experts run steps of canvases on GPUs where that was measured, beside vLLM's own choice.

A step of canvases gives each expert more rows than decoding does and fewer than a prompt. vLLM
ships no tile sizes of its Triton kernel for the 26B model's experts; `tuned` does. Files there are
named and written as vLLM's, which looks for them in `VLLM_TUNED_CONFIG_FOLDER` before its own
folder. With them, this kernel is faster than the one that vLLM picks for FP8. `few_rows.json` says
by the same names at how many rows of a step our own kernel is faster still, and in blocks of how
many rows; 0 means vLLM's kernel.
"""

import json
import os
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)

FOLDER = Path(__file__).parent / "tuned"
VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"
FEW_ROWS = "few_rows.json"


def set_tuned_config_folder(folder: Path = FOLDER) -> None:
    """Makes this process and its children read tile sizes from `folder`, by `VARIABLE` in the
    environment. Does nothing if that is set already, or without an NVIDIA GPU. Repeatable."""
    if current_platform.is_cuda():
        os.environ.setdefault(VARIABLE, str(folder))


def may_replace_experts(vllm_config: VllmConfig, folder: Path = FOLDER) -> bool:
    """Whether experts may run other kernels and tile sizes than vLLM's: not if the user named
    another kernel or has tile sizes of their own, nor under `VLLM_BATCH_INVARIANT`, where a row may
    not depend on how many there are. `folder`: where this server's tile sizes are, if not in
    `FOLDER`."""
    is_ours = os.environ.get(VARIABLE, str(FOLDER)) in (str(FOLDER), str(folder))
    backend = vllm_config.kernel_config.moe_backend
    return is_ours and backend in ("auto", "triton") and not envs.VLLM_BATCH_INVARIANT


def prefer_tuned_kernel(vllm_config: VllmConfig, folder: Path = FOLDER) -> None:
    """Sets `--moe-backend triton` in `vllm_config`, in place, where we ship tile sizes for the
    model's FP8 experts on this GPU. Does nothing without an NVIDIA GPU, if the user named a
    backend, and where `may_replace_experts` says no."""
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    if not current_platform.is_cuda() or vllm_config.kernel_config.moe_backend != "auto":
        return
    experts = getattr(model_config.hf_text_config, "num_experts", None)
    if not experts or not _is_fp8_by_channel(model_config.hf_config):
        return
    if not may_replace_experts(vllm_config, folder):
        return
    from vllm_dllm.compat.experts import name_tiles_file  # takes seconds

    width = model_config.hf_text_config.moe_intermediate_size
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    ranks *= parallel.prefill_context_parallel_size
    if parallel.enable_expert_parallel:
        experts //= ranks
    else:
        width //= ranks
    if (FOLDER / name_tiles_file(experts, width, "fp8_w8a8")).exists():
        vllm_config.kernel_config.moe_backend = "triton"
        logger.info(
            "Experts run vLLM's Triton kernel (--moe-backend triton), with tile sizes for canvases "
            "that were measured on such a GPU."
        )


def shipped_few_rows() -> dict[str, dict[str, int]]:
    """Returns what `few_rows.json` says, by names of files of tile sizes."""
    found: dict[str, dict[str, int]] = json.loads((FOLDER / FEW_ROWS).read_text())
    return found


def _is_fp8_by_channel(config: Any) -> bool:
    """Whether a checkpoint's weights are FP8 with a scale for each output channel, as
    compressed-tensors writes them. `config`: its configuration."""
    found = getattr(config, "quantization_config", None) or {}
    weights = [group.get("weights") or {} for group in found.get("config_groups", {}).values()]
    return bool(weights) and all(
        (each.get("type"), each.get("num_bits"), each.get("strategy")) == ("float", 8, "channel")
        for each in weights
    )

"""Which of vLLM's kernels a model's experts are loaded for, where that was measured on such a GPU:
ours reads weights as that kernel does, and runs where it can."""

from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dllm.config import tiles
from vllm_dllm.config.extension import KernelChoice
from vllm_dllm.measured.folder import result_folder

logger = init_logger(__name__)


def prefer_tuned_experts(vllm_config: VllmConfig, kernel_choice: KernelChoice) -> None:
    """Has vLLM run experts with measured tile sizes, those that `kernel_choice` names: sets the MoE
    backend in `vllm_config`, in place, where we ship tiles for this model and GPU, and
    VLLM_TUNED_CONFIG_FOLDER in this process' environment, which its children inherit. Leaves alone
    what the user has set. Does nothing for `stock`, or without an NVIDIA GPU."""
    if kernel_choice == "stock":
        return
    own = tiles.FOLDER
    if kernel_choice == "measured":
        own = result_folder(vllm_config)  # empty before the first start has measured
    set_moe_backend(vllm_config, own)
    tiles.set_tuned_config_folder(own)


def set_moe_backend(vllm_config: VllmConfig, folder: Path = tiles.FOLDER) -> None:
    """Sets `--moe-backend triton` in `vllm_config`, in place, where we ship tile sizes for the
    model's FP8 experts on this GPU. Does nothing without an NVIDIA GPU, if the user named a
    backend, and where `tiles.may_replace_experts` says no."""
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    if not current_platform.is_cuda() or vllm_config.kernel_config.moe_backend != "auto":
        return
    experts = getattr(model_config.hf_text_config, "num_experts", None)
    if not experts or not _is_fp8_by_channel(model_config.hf_config):
        return
    if not tiles.may_replace_experts(vllm_config, folder):
        return
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name  # takes seconds

    width = model_config.hf_text_config.moe_intermediate_size
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    ranks *= parallel.prefill_context_parallel_size
    if parallel.enable_expert_parallel:
        experts //= ranks
    else:
        width //= ranks
    if (tiles.FOLDER / get_config_file_name(experts, width, "fp8_w8a8")).exists():
        vllm_config.kernel_config.moe_backend = "triton"
        logger.info(
            "Experts run our kernel, which was faster on such a GPU, and where it cannot, vLLM's "
            "Triton kernel (--moe-backend triton)."
        )


def _is_fp8_by_channel(config: Any) -> bool:
    """Whether a checkpoint's weights are FP8 with a scale for each output channel, as
    compressed-tensors writes them. `config`: its configuration."""
    found = getattr(config, "quantization_config", None) or {}
    weights = [group.get("weights") or {} for group in found.get("config_groups", {}).values()]
    return bool(weights) and all(
        (each.get("type"), each.get("num_bits"), each.get("strategy")) == ("float", 8, "channel")
        for each in weights
    )

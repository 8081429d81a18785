"""vLLM's DFlash2 speculator, with a check of the drafter."""

import torch
from vllm.config import VllmConfig

from vllm_dllm.compat.dflash import DFlash2Hooks
from vllm_dllm.drafters.layout import check_served_drafter, extend_positions

KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")  # of DFlash2 only


class CheckedDFlash2Speculator(DFlash2Hooks):
    """vLLM's DFlash2 speculator. Raises InputError if the drafter's config is not complete or
    does not fit the target."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        check_served_drafter(vllm_config, KEYS)
        extend_positions(vllm_config)
        super().__init__(vllm_config, device)

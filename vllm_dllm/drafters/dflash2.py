"""vLLM's DFlash2 speculator, with a check of the drafter."""

import torch
from vllm.config import VllmConfig

from vllm_dllm.compat.dflash import DFlash2Hooks
from vllm_dllm.drafters.dflash import read_drafter_config
from vllm_dllm.drafters.layout import check_drafter

KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")  # of DFlash2 only


class CheckedDFlash2Speculator(DFlash2Hooks):
    """vLLM's DFlash2 speculator. Raises DrafterMismatch if the drafter's config is not complete or
    does not fit the target."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        draft, target = vllm_config.speculative_config.draft_model_config, vllm_config.model_config
        check_drafter(
            read_drafter_config(draft), target.hf_config.to_dict(), draft.model, target.model, KEYS
        )
        super().__init__(vllm_config, device)

"""LLaDA2.0 to 2.2 for vLLM: the layers of Ling 2.0, which vLLM has as BailingMoeV2."""

from contextlib import nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.bailing_moe import BailingMoeV2ForCausalLM

from vllm_dllm.compat.expert_choice import chosen_by
from vllm_dllm.config.architectures import edit_token_ids
from vllm_dllm.models.block_routing import BlockRouting
from vllm_dllm.models.masked import MaskedModel


class LLaDA2MoeModelLM(MaskedModel, BailingMoeV2ForCausalLM):
    """Named as in the checkpoints' own modeling_llada2_moe.py."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config, routing = vllm_config.model_config.hf_config, None
        if config.expert_capacity:
            routing = BlockRouting(config, vllm_config.scheduler_config.max_num_batched_tokens)
        with nullcontext() if routing is None else chosen_by(routing.choose):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.routing = routing

    def get_model_state_cls(self) -> type:
        from vllm_dllm.step.masked.masked_state import LevenshteinModelState

        if edit_token_ids(self.config) == (None, None):
            return super().get_model_state_cls()
        return LevenshteinModelState

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if self.routing is not None:
            self.routing.start(positions)
        return super().forward(input_ids, positions, *args, **kwargs)

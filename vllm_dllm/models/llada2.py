"""LLaDA2.0 to 2.2 for vLLM: the layers of Ling 2.0, which vLLM has as BailingMoeV2."""

from contextlib import nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.bailing_moe import BailingMoeV2ForCausalLM

from vllm_dllm.compat.attention import use_routing_function
from vllm_dllm.models.masked import MaskedModel


class LLaDA2MoeModelLM(MaskedModel, BailingMoeV2ForCausalLM):
    """LLaDA2.0 to 2.2, named as in the checkpoints' own modeling_llada2_moe.py."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Builds the layers. If the checkpoint has an `expert_capacity`, as LLaDA2.2 has, they
        choose experts block by block (`BlockRouting`)."""
        config, routing = vllm_config.model_config.hf_config, None
        if config.expert_capacity:
            routing = BlockRouting(config, vllm_config.scheduler_config.max_num_batched_tokens)
        with nullcontext() if routing is None else use_routing_function(routing.choose_experts):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.routing = routing

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs the layers, after `BlockRouting` has learnt the blocks of the step's rows."""
        if self.routing is not None:
            self.routing.number_blocks(positions)
        return super().forward(input_ids, positions, *args, **kwargs)


class BlockRouting:
    """Selects experts as LLaDA2.2 does. The rows of a block together select `expert_capacity`
    experts, and each row selects its own among them.

    Legend: T = rows, E = experts.
    """

    def __init__(self, config: Any, max_num_tokens: int) -> None:
        """Takes the block and the experts from the checkpoint's `config`. `max_num_tokens`: the
        most rows of a step."""
        self.block_length: int = config.block_size
        self.capacity: int = config.expert_capacity
        self.scale: float = config.routed_scaling_factor
        # [max_num_tokens] int64: the block of each row of a step. CUDA graphs keep its address.
        self.blocks = torch.zeros(max_num_tokens, dtype=torch.int64)

    def number_blocks(self, positions: torch.Tensor) -> None:
        """Writes the block of each row of a step to `blocks`. `positions`: [T] int64, in their
        requests."""
        begins = positions % self.block_length == 0
        begins[1:] |= positions[1:] != positions[:-1] + 1
        begins[:1] = False
        self.blocks[: len(positions)] = begins.cumsum(dim=0)

    def choose_experts(
        self,
        hidden_states: torch.Tensor,  # [T, H]
        gating_output: torch.Tensor,  # [T, E]
        topk: int,
        renormalize: bool,
        *,
        bias: torch.Tensor,  # [E] fp32, takes part in the choice alone
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights [T, topk] fp32 and experts [T, topk] int64. An expert's score for a block
        is its best score for any row of the block. `number_blocks` must have been called for the
        step."""
        scores = gating_output.float().sigmoid()
        biased = scores + bias
        blocks = self.blocks[: scores.shape[0], None]
        best = torch.full_like(biased, -torch.inf).scatter_reduce(
            0, blocks.expand_as(biased), biased, "amax"
        )
        chosen = best.topk(self.capacity, dim=-1).indices
        allowed = torch.zeros_like(biased, dtype=torch.bool).scatter(1, chosen, True)
        experts = biased.masked_fill(~allowed[blocks[:, 0]], -torch.inf).topk(topk, dim=-1).indices
        weights = scores.gather(1, experts)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * self.scale, experts

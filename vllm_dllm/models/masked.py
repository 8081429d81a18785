"""Masked models: layers of a vLLM model, with attention by blocks. Classes are named as in the
checkpoints' own modelling files."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.bailing_moe import BailingMoeV2ForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.platforms import current_platform

from vllm_dllm.attention import use_window_rules
from vllm_dllm.compat.experts import use_routing_function
from vllm_dllm.config.architectures import family_of
from vllm_dllm.models.vocabulary import no_logits
from vllm_dllm.quantization.checked_weights import load_checked
from vllm_dllm.quantization.config import adapt_masked_quant_config


class MaskedModel:
    """Mixed into vLLM's class of the same layers, before that class."""

    config: Any
    packed_modules_mapping: dict[str, list[str]]

    names = WeightsMapper()
    """Maps the checkpoints' names to those that vLLM's class loads."""
    embedding_modules: ClassVar[dict[str, str]] = {}
    """Embeddings that LoRA adapters may change: none. vLLM expects one row of logits a request."""
    streams_vocabulary = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Builds layers whose attention knows blocks. Adapts the quantisation config in place."""
        vllm_config.quant_config = adapt_masked_quant_config(vllm_config.quant_config)
        lora_config = vllm_config.lora_config
        if current_platform.is_cpu():  # where adapters leave experts as they are
            vllm_config.lora_config = None
        with use_window_rules(vllm_config.attention_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        vllm_config.lora_config = lora_config

    def get_model_state_cls(self) -> type:
        """Returns the family's `ModelState`, imported late because it needs the model runner."""
        from vllm_dllm.step.masked.masked_state import state_class

        family = family_of(type(self).__name__, self.config)
        assert family is not None, "a masked model is named like its architecture"
        return state_class(family)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads a checkpoint's tensors, and returns the names of those loaded. Raises ValueError,
        naming the tensor, if one is missing, unknown, of another shape or type, not all numbers, or
        an impossible scale."""
        # A server that has slept loads again, into a head and embeddings that are not tied yet.
        tied = ("lm_head.",) if self.config.tie_word_embeddings else ()

        def load(checked: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            return self.load_named_weights(self.names.apply(checked))

        return load_checked(self, load, weights, self.names, tied)

    def load_named_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads weights that have the names of vLLM's class. Returns the names of those loaded."""
        return super().load_weights(weights)  # type: ignore[misc]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Returns logits [rows, V] fp32; None on ranks that do not sample."""
        if len(hidden_states) == 0:
            return no_logits(hidden_states, self.config.vocab_size)
        logits = super().compute_logits(hidden_states)  # type: ignore[misc]
        return None if logits is None else logits.float()


class SDARForCausalLM(MaskedModel, Qwen3ForCausalLM):
    """The model of SDAR and TraDo, with the layers of Qwen3."""


class SDARMoeForCausalLM(MaskedModel, Qwen3MoeForCausalLM):
    """The model of SDAR with experts, with the layers of Qwen3's mixtures of experts."""


class Fast_dLLM_QwenForCausalLM(MaskedModel, Qwen2ForCausalLM):
    """The model of Fast-dLLM v2, with the layers of Qwen2. Rows have the next token's logits."""


class NemotronLabsDiffusionModel(MaskedModel, MistralForCausalLM):
    """The model that checkpoints call by this name in their own
    modeling_nemotron_labs_diffusion.py. Causal rows, such as a prompt's, have the next token's
    logits."""

    names = WeightsMapper(orig_to_new_prefix={"encoder.": "model.", "diffusion_head.": "lm_head."})
    hf_to_vllm_mapper = MistralForCausalLM.hf_to_vllm_mapper | names  # of quantised layers, too

    def load_named_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads weights by vLLM's general loader. Mistral's own method expects the names and the
        rotations of its consolidated files. Returns the names of those loaded."""
        return AutoWeightsLoader(self).load_weights(weights)


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
    experts, and each row selects its own among them. Legend: T = rows, E = experts."""

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

"""Masked models with the layers of Qwen: SDAR, TraDo and Fast-dLLM v2. Classes are named as in the
checkpoints' own modelling files."""

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from vllm_dllm.models.masked import MaskedModel


class SDARForCausalLM(MaskedModel, Qwen3ForCausalLM):
    """The model of SDAR and TraDo, with the layers of Qwen3."""


class SDARMoeForCausalLM(MaskedModel, Qwen3MoeForCausalLM):
    """The model of SDAR with experts, with the layers of Qwen3's mixtures of experts."""


class Fast_dLLM_QwenForCausalLM(MaskedModel, Qwen2ForCausalLM):
    """The model of Fast-dLLM v2, with the layers of Qwen2. Its rows have the next token's
    logits."""

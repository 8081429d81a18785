"""SDAR and TraDo for vLLM: Qwen3's layers."""

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from vllm_dllm.models.masked import MaskedModel


class SDARForCausalLM(MaskedModel, Qwen3ForCausalLM):
    """Named as in the checkpoints' own modeling_sdar.py."""


class SDARMoeForCausalLM(MaskedModel, Qwen3MoeForCausalLM):
    """Named as in the checkpoints' own modeling_sdar_moe.py."""

"""LLaDA2.0 for vLLM: the layers of Ling 2.0, which vLLM has as BailingMoeV2."""

from vllm.model_executor.models.bailing_moe import BailingMoeV2ForCausalLM

from vllm_dllm.models.masked import MaskedModel


class LLaDA2MoeModelLM(MaskedModel, BailingMoeV2ForCausalLM):
    """Named as in the checkpoints' own modeling_llada2_moe.py."""

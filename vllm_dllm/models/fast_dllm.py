"""Fast-dLLM v2 for vLLM: the layers of Qwen2.5."""

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from vllm_dllm.models.masked import MaskedModel


class Fast_dLLM_QwenForCausalLM(MaskedModel, Qwen2ForCausalLM):
    """Named as in the checkpoints' own modeling.py. A row has the next token's logits."""

    def get_model_state_cls(self) -> type:
        from vllm_dllm.step.masked.masked_state import ShiftedModelState

        return ShiftedModelState

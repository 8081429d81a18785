"""The config.json of Fast-dLLM v2 checkpoints: Qwen2.5's, with a block and a mask."""

from transformers import Qwen2Config


class FastDLLMQwenConfig(Qwen2Config):
    model_type = "Fast_dLLM_Qwen"

    bd_size: int = 32
    mask_token_id: int = 151665

    @property
    def canvas_length(self) -> int:
        """The name by which vLLM knows diffusion models."""
        return self.bd_size

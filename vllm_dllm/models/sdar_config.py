"""The config.json of SDAR and TraDo checkpoints: Qwen3's, with a block and a mask."""

from transformers import Qwen3Config, Qwen3MoeConfig


class SDARConfig(Qwen3Config):
    model_type = "sdar"

    block_size: int = 4
    mask_token_id: int = 151669

    @property
    def canvas_length(self) -> int:
        """The name by which vLLM knows diffusion models."""
        return self.block_size


class SDARMoeConfig(Qwen3MoeConfig):
    model_type = "sdar_moe"

    block_size: int = 4
    mask_token_id: int = 151669

    @property
    def canvas_length(self) -> int:
        return self.block_size

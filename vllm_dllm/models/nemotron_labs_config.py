"""The config.json of Nemotron-Labs-Diffusion checkpoints: Ministral 3's, and a block and a mask."""

from transformers import Ministral3Config


class NemotronLabsDiffusionConfig(Ministral3Config):
    model_type = "nemotron_labs_diffusion"

    block_size: int = 32
    mask_token_id: int = 100
    dlm_paradigm: str = "bidirectional"

    @property
    def canvas_length(self) -> int:
        """The name by which vLLM knows diffusion models."""
        return self.block_size

    @property
    def llama_4_scaling(self) -> dict[str, float] | None:
        """The name by which vLLM's layers know how queries grow with their position."""
        rope = self.rope_parameters
        if "llama_4_scaling_beta" not in rope:
            return None
        original = rope["original_max_position_embeddings"]
        beta = rope["llama_4_scaling_beta"]
        return {"beta": beta, "original_max_position_embeddings": original}

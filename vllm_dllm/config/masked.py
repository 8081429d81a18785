"""What a masked model's checkpoint says of its blocks, read and checked once at start-up."""

from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig

THRESHOLDS = {"SDARForCausalLM": 0.85, "SDARMoeForCausalLM": 0.85, "LLaDA2MoeModelLM": 0.95}
"""Architectures of masked models, and the probability that reveals a token in their own loops."""


def is_masked(vllm_config: VllmConfig) -> bool:
    model_config = vllm_config.model_config
    return model_config is not None and model_config.architecture in THRESHOLDS


@dataclass(frozen=True)
class MaskedConfig:
    block_length: int
    """Tokens of a block, the canvas length."""
    mask_id: int
    """The token that stands for a hidden one."""
    threshold: float
    """Candidates that are more probable are revealed, if neither request nor server says more."""

    @classmethod
    def read(cls, vllm_config: VllmConfig) -> "MaskedConfig":
        """`block_size` (or --diffusion-config) and `mask_token_id` of config.json.

        Raises:
            ValueError: a value is missing or impossible; names the file and the key.
        """
        model_config, diffusion_config = vllm_config.model_config, vllm_config.diffusion_config
        assert diffusion_config is not None, "the serving config makes it"
        hf_config: Any = model_config.hf_config
        mask_id, vocab_size = hf_config.mask_token_id, model_config.get_vocab_size()
        if not isinstance(mask_id, int) or not 0 <= mask_id < vocab_size:
            raise ValueError(
                f"mask_token_id in {model_config.model}/config.json must be a token from 0 to "
                f"{vocab_size - 1} (vocab_size), got {mask_id!r}. Correct it, or pass "
                f"--hf-overrides '{{\"mask_token_id\": ...}}'."
            )
        threshold = THRESHOLDS[model_config.architecture]
        return cls(diffusion_config.canvas_length, mask_id, threshold)

    def check_cache(self, page: int, option: str) -> None:
        """Raises ValueError unless cached pages of so many tokens hold whole blocks: keys and
        values of a part of a block depend on what follows it."""
        if page % self.block_length != 0:
            raise ValueError(
                f"{option} must be a multiple of the model's block of {self.block_length} tokens "
                f"(block_size in config.json), got {page}: a cached page holds whole blocks. Pass "
                f"another one or leave it out."
            )

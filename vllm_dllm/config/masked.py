"""What a masked model's checkpoint says of its blocks, read and checked once at start-up."""

from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig

from vllm_dllm.config.architectures import FAMILIES, Family


@dataclass(frozen=True)
class MaskedConfig:
    block_length: int
    """Tokens of a block, the canvas length."""
    mask_id: int
    """The token that stands for a hidden one."""
    family: Family
    """Its threshold holds if neither request nor server says more."""

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> "MaskedConfig | None":
        """None: not a masked model."""
        model_config = vllm_config.model_config
        if model_config is None or model_config.architecture not in FAMILIES:
            return None
        return cls.read(vllm_config)

    @classmethod
    def read(cls, vllm_config: VllmConfig) -> "MaskedConfig":
        """The block's length (or --diffusion-config) and `mask_token_id` of config.json.

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
        family = FAMILIES[model_config.architecture]
        for key, wanted in family.fixed.items():
            if (found := getattr(hf_config, key, wanted)) != wanted:
                served = "left out" if wanted is None else repr(wanted)
                raise ValueError(
                    f"{key} in {model_config.model}/config.json must be {served}, got {found!r}: "
                    f"checkpoints of other variants are not served. Use another checkpoint."
                )
        return cls(diffusion_config.canvas_length, mask_id, family)

    def check_cache(self, page: int, option: str) -> None:
        """Raises ValueError unless cached pages of so many tokens hold whole blocks: keys and
        values of a part of a block depend on what follows it, unless known tokens are causal."""
        if page % self.block_length != 0 and not self.family.is_causal:
            raise ValueError(
                f"{option} must be a multiple of the model's block of {self.block_length} tokens "
                f"({self.family.block_key} in config.json), got {page}: a cached page holds whole "
                f"blocks. Pass another one or leave it out."
            )

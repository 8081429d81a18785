"""What a masked model's checkpoint says of its blocks, read and checked once at start-up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig


@dataclass(frozen=True)
class Family:
    """What the published loop of an architecture does."""

    threshold: float
    """Candidates that are more probable are revealed."""
    is_causal: bool = False
    """Known tokens see what is before them alone, the last one foretells the canvas' first, and
    blocks begin where the prompt ends. Else all rows see their whole block, and blocks are counted
    from the prompt's first token.

    With this go two more things of Nemotron's loop: a candidate that is exactly as probable as
    the threshold is revealed, too; and temperature, top_k, top_p and min_p do not change how
    probable it is."""
    is_shifted: bool = False
    """A row's logits are those of the token after it. So the last row of a finished block foretells
    the next one's first token, which is always the most probable one."""
    sub_block_length: int | None = None
    """Tokens of a part of the block that is revealed before those behind it. None: no parts."""
    block_key: str = "block_size"
    """Of the block's length in config.json."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """What config.json may not say otherwise: variants whose layers or steps are other ones."""

    @property
    def is_seeded(self) -> bool:
        """Whether a canvas' first token is known before its first step, and a block is finished
        when nothing is hidden before a token that ends the answer."""
        return self.is_causal or self.is_shifted


_NO_WINDOWS = {"use_sliding_window": False}
FAMILIES = {
    "SDARForCausalLM": Family(threshold=0.85, fixed=_NO_WINDOWS),
    "SDARMoeForCausalLM": Family(threshold=0.85, fixed=_NO_WINDOWS),
    "LLaDA2MoeModelLM": Family(
        threshold=0.95,
        fixed={
            "score_function": "sigmoid",
            "use_rmsnorm": True,
            "norm_head": False,
            # LLaDA2.2's, which change how many tokens a block has.
            "delete_token_id": None,
            "split_token_id": None,
            "image_token_offset": None,  # LLaDA2.0-Uni's, which writes images, too
        },
    ),
    "NemotronLabsDiffusionModel": Family(
        threshold=0.9, is_causal=True, fixed={"dlm_paradigm": "bidirectional"}
    ),
    "Fast_dLLM_QwenForCausalLM": Family(
        threshold=1.0,
        is_shifted=True,
        sub_block_length=8,
        block_key="bd_size",
        fixed=_NO_WINDOWS,
    ),
}
"""Of masked models, by architecture."""


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

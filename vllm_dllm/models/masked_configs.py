"""Configurations of masked models: those of their layers, with a block and a mask. Defaults are
those of the checkpoints' own modelling files."""

from typing import Any

from transformers import (
    Ministral3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)


class _Blocks:
    """Mixed into the configuration of a model's layers. Adds the block."""

    block_size: int

    @property
    def canvas_length(self) -> int:
        """Returns how many tokens a block has. By this name vLLM knows diffusion models."""
        return self.block_size


class SDARConfig(_Blocks, Qwen3Config):
    """The configuration of SDAR and TraDo."""

    model_type = "sdar"

    block_size: int = 4
    mask_token_id: int = 151669


class SDARMoeConfig(_Blocks, Qwen3MoeConfig):
    """The configuration of SDAR with experts."""

    model_type = "sdar_moe"

    block_size: int = 4
    mask_token_id: int = 151669


class FastDLLMQwenConfig(Qwen2Config):
    """The configuration of Fast-dLLM v2, whose checkpoints call the block's tokens `bd_size`."""

    model_type = "Fast_dLLM_Qwen"

    bd_size: int = 32
    mask_token_id: int = 151665

    @property
    def canvas_length(self) -> int:
        """Returns how many tokens a block has. By this name vLLM knows diffusion models."""
        return self.bd_size


class NemotronLabsDiffusionConfig(_Blocks, Ministral3Config):
    """The configuration of Nemotron-Labs-Diffusion."""

    model_type = "nemotron_labs_diffusion"

    block_size: int = 32
    mask_token_id: int = 100
    dlm_paradigm: str = "bidirectional"

    @property
    def llama_4_scaling(self) -> dict[str, float] | None:
        """Returns how queries grow with their position, under the name that vLLM's layers read.
        Returns None if they do not grow."""
        rope = self.rope_parameters
        if "llama_4_scaling_beta" not in rope:
            return None
        original = rope["original_max_position_embeddings"]
        beta = rope["llama_4_scaling_beta"]
        return {"beta": beta, "original_max_position_embeddings": original}


class LLaDA2MoeConfig(_Blocks, PretrainedConfig):
    """The configuration of LLaDA2.0 to 2.2."""

    model_type = "llada2_moe"

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int | None = 128
    hidden_act: str = "silu"
    use_qkv_bias: bool = False
    use_bias: bool = False
    use_qk_norm: bool = True
    use_rmsnorm: bool = True
    rms_norm_eps: float = 1e-6
    norm_head: bool = False
    tie_word_embeddings: bool = False
    embedding_dropout: float = 0.0
    max_position_embeddings: int = 32768
    rope_parameters: dict | None = None
    partial_rotary_factor: float = 0.5
    num_experts: int = 256
    num_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    expert_capacity: int | None = None
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    score_function: str = "sigmoid"
    moe_router_enable_expert_bias: bool = True
    router_dtype: str | None = "fp32"
    use_sliding_window: bool = False
    sliding_window: int | None = None
    use_cache: bool = False
    pad_token_id: int | None = 156892
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 156892
    block_size: int = 32
    mask_token_id: int = 156895

    def __post_init__(self, **kwargs: Any) -> None:
        """Removes the sliding window of a checkpoint that does not use it."""
        if not self.use_sliding_window:  # vLLM looks at the window alone
            self.sliding_window = None
        super().__post_init__(**kwargs)

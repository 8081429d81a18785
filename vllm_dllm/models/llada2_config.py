"""The config.json of LLaDA2.0 to 2.2. What it leaves out is what their modelling files do."""

from typing import Any

from transformers import PretrainedConfig


class LLaDA2MoeConfig(PretrainedConfig):
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
        if not self.use_sliding_window:  # vLLM looks at the window alone
            self.sliding_window = None
        super().__post_init__(**kwargs)

    @property
    def canvas_length(self) -> int:
        """The name by which vLLM knows diffusion models."""
        return self.block_size

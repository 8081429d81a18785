"""The models that we serve, by the architecture that their `config.json` names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

DIFFUSION_GEMMA = "DiffusionGemmaForBlockDiffusion"


@dataclass(frozen=True)
class Family:
    """A kind of masked models: where its classes are, and what its published decoding loop does."""

    module: str
    """Module in `models/` of the model's class, which is named like the architecture."""
    config: str
    """Class of its config.json, in `models/masked_configs.py`."""
    threshold: float
    """Probability above which a candidate is revealed, where neither request nor server sets
    one."""
    is_causal: bool = False
    """Whether known tokens see only tokens before them. If so, the last known token predicts the
    canvas' first one, and blocks begin where the prompt ends. If not, each token sees its whole
    block, and blocks are counted from the prompt's first token.

    Two more rules of Nemotron's loop apply where this is set. A candidate exactly as probable as
    the threshold is revealed, too. And temperature, top_k, top_p and min_p do not change its
    probability.
    """
    is_shifted: bool = False
    """Whether a row's logits are for the token after it. If so, the last row of a finished block
    predicts the next block's first token, for which the most probable one is always taken."""
    sub_block_length: int | None = None
    """Tokens of a part of the block. A part is revealed before the part after it. None: no
    parts."""
    block_key: str = "block_size"
    """Key of the block's length in config.json."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values that config.json must have, where it has the key. Checkpoints with other values have
    other layers or steps. None: config.json must not have the key."""
    edit_probability: float | None = None
    """Probability above which a candidate replaces a revealed token. None: revealed tokens stay."""
    moves_tokens: bool = False
    """Whether two special tokens move others: one deletes the token in its place, one inserts a
    mask before it (`step.masked.levenshtein_step`)."""

    @property
    def knows_first_token(self) -> bool:
        """Whether a canvas' first token is known before its first step. A block of such a family is
        finished when no mask is left before a token that ends the answer."""
        return self.is_causal or self.is_shifted

    @property
    def allows_blocks_in_flight(self) -> bool:
        """Whether a block can begin before the one before it is finished."""
        return not (self.knows_first_token or self.moves_tokens)


_NO_WINDOWS = {"use_sliding_window": False}
# I-DLM names SDAR's architecture, too, but its rows are causal and predict the next token.
_SDAR = {**_NO_WINDOWS, "use_regular_causal": False}
FAMILIES = {
    "SDARForCausalLM": Family("masked", "SDARConfig", threshold=0.85, fixed=_SDAR),
    "SDARMoeForCausalLM": Family("masked", "SDARMoeConfig", threshold=0.85, fixed=_SDAR),
    "LLaDA2MoeModelLM": Family(
        "masked",
        "LLaDA2MoeConfig",
        threshold=0.95,
        fixed={
            "score_function": "sigmoid",
            "use_rmsnorm": True,
            "norm_head": False,
            **_NO_WINDOWS,
            "image_token_offset": None,  # a key of LLaDA2.0-Uni, which also generates images
        },
    ),
    "NemotronLabsDiffusionModel": Family(
        "masked",
        "NemotronLabsDiffusionConfig",
        threshold=0.9,
        is_causal=True,
        # Rows of the type "dream" predict the next token in a canvas, too.
        fixed={"dlm_paradigm": "bidirectional", "dlm_type": "llada"},
    ),
    "Fast_dLLM_QwenForCausalLM": Family(
        "masked",
        "FastDLLMQwenConfig",
        threshold=1.0,
        is_shifted=True,
        sub_block_length=8,
        block_key="bd_size",
        fixed=_NO_WINDOWS,
    ),
}
"""Families of masked models, by architecture."""
LLADA22 = replace(
    FAMILIES["LLaDA2MoeModelLM"], threshold=0.5, edit_probability=0.0, moves_tokens=True
)
"""The family of LLaDA2.2, whose config.json names the architecture of LLaDA2.0."""


def family_of(architecture: str, hf_config: Any) -> Family | None:
    """Returns the family of a checkpoint by its config.json: the architecture and, for LLaDA2.2,
    the tokens that edit. None: it is no masked model."""
    family = FAMILIES.get(architecture)
    if family is FAMILIES["LLaDA2MoeModelLM"] and edit_token_ids(hf_config) != (None, None):
        return LLADA22
    return family


def takes_acceptance(family: Family | None, rule: str, blocks_in_flight: int = 2) -> bool:
    """Returns whether models of `family` take the value `rule` of `diffusion_acceptance` on a
    server with `blocks_in_flight`. `family` None: a model whose canvases begin as noise."""
    if rule != "verified":
        return family is not None or rule != "in_order"
    if family is None:
        return False
    # Where rows have their own logits, with room for a copy of the block.
    return family.is_shifted or (family.allows_blocks_in_flight and blocks_in_flight > 1)


def edit_token_ids(hf_config: Any) -> tuple[Any, Any]:
    """Returns config.json's ids of the tokens that delete and insert, None for a missing key."""
    return getattr(hf_config, "delete_token_id", None), getattr(hf_config, "split_token_id", None)


def register_configs() -> None:
    """Registers the config classes of masked models with transformers. Repeatable."""
    from transformers import AutoConfig  # takes seconds

    for family in FAMILIES.values():
        config_class = resolve_name(f"vllm_dllm.models.masked_configs:{family.config}")
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)

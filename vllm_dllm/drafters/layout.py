"""Reads the config of a DFlash drafter, and checks that the drafter fits its target.

Drafters come in two layouts. Those of z-lab have `dflash_config` next to Qwen3's own fields. Those
of RedHatAI, written by the `speculators` library, have Qwen3's fields under
`transformer_layer_config`. They count the target's layers from the embedding: their
`aux_hidden_state_layer_ids` are one higher than `target_layer_ids`. Layer ids here are z-lab's: i
is the output of the target's layer i, from 0.

A block has one slot more than it drafts tokens: the anchor. Drafters whose anchor is a prediction,
too, as DeepSpec trains them, draft as many tokens as a block has slots. They are refused, as by
vLLM, which looks for one of the keys that say so, and in one place.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from vllm_dllm.errors import InputError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

TABLE_ROPES = {"default", "linear", "llama3", "ntk", "proportional"}
"""Types of rotary embeddings for which `max_position_embeddings` is only the size of a table."""

ANCHOR_KEYS = ("sample_from_anchor", "query_zero_predicts_next")
"""Keys of a config that say whether the anchor's row predicts the next token."""

PADDING = 1024  # a target's vocabulary may have as many tokens more than its drafter's


@dataclass(frozen=True)
class DrafterLayout:
    """The parts of a drafter's config that its target or the settings must fit."""

    num_layers: int
    block_size: int | None  # slots, the anchor included; None, here and below: not in the config
    mask_token_id: int
    target_layer_ids: tuple[int, ...] | None  # from 0; the drafter reads their outputs
    hidden_size: int  # of the target's hidden states
    vocab_size: int  # of the target
    num_target_layers: int | None  # of the target


def read_layout(
    config: Mapping[str, Any],  # a drafter's config.json, in either layout
    name: str,  # of the drafter, for errors
    needed: Collection[str] = (),  # more keys that a drafter of this kind has
) -> DrafterLayout:
    """Returns the layout that a drafter's config describes. Raises InputError if the config is not
    that of a DFlash drafter, or not complete, or if the anchor is a prediction."""
    is_speculators = "transformer_layer_config" in config
    inner = config["transformer_layer_config"] if is_speculators else config
    options = config if is_speculators else {**config, **(config.get("dflash_config") or {})}
    if missing := [key for key in needed if options.get(key) is None]:
        raise InputError(
            f"{name} is not complete: expected {', '.join(missing)} in its config, in z-lab's "
            f"layout (dflash_config) or that of speculators (transformer_layer_config)"
        )
    if anchored := next((key for key in ANCHOR_KEYS if options.get(key)), None):
        raise InputError(
            f"{name} predicts a token from the anchor ({anchored} in its config), which DFlash "
            f"here does not: every draft would be off by one token. Use another drafter."
        )
    layer_ids: list[int] | None
    try:
        if is_speculators:
            layer_ids = [i - 1 for i in options["aux_hidden_state_layer_ids"]]
        else:
            layer_ids = options.get("target_layer_ids")
        return DrafterLayout(
            num_layers=inner["num_hidden_layers"],
            block_size=options.get("block_size"),
            mask_token_id=options["mask_token_id"],
            target_layer_ids=None if layer_ids is None else tuple(layer_ids),
            hidden_size=config.get("target_hidden_size") or inner["hidden_size"],
            vocab_size=inner["vocab_size"],
            num_target_layers=config.get("num_target_layers"),
        )
    except KeyError as error:
        raise InputError(
            f"{name} is not a DFlash drafter: expected {error.args[0]} in its config, in z-lab's "
            f"layout (dflash_config) or that of speculators (transformer_layer_config)"
        ) from None


def check_drafter(
    drafter_config: Mapping[str, Any],
    target_config: Mapping[str, Any],  # the target's config.json
    drafter: str,  # name or path, for errors, as is `target`
    target: str,
    needed: Collection[str] = (),  # keys, as in `read_layout`
) -> DrafterLayout:
    """Returns the drafter's layout, if the drafter fits the target. Raises InputError if it does
    not, whose message has all differences."""
    layout = read_layout(drafter_config, drafter, needed)
    text = target_config.get("text_config") or target_config
    num_layers, vocab_size = text["num_hidden_layers"], text["vocab_size"]
    wrong: list[str] = []
    for what, ours, theirs in (
        ("hidden size", layout.hidden_size, text["hidden_size"]),
        ("target layers", layout.num_target_layers, num_layers),
    ):
        if ours is not None and ours != theirs:
            wrong.append(f"{what}: {ours} in the drafter, {theirs} in the target")
    if not 0 <= vocab_size - layout.vocab_size <= PADDING:
        wrong.append(f"vocabulary: {layout.vocab_size} in the drafter, {vocab_size} in the target")
    beyond = [i for i in layout.target_layer_ids or () if not 0 <= i < num_layers]
    if beyond:
        wrong.append(
            f"layer ids {beyond} of the drafter, layers 0 to {num_layers - 1} in the target"
        )
    if not 0 <= layout.mask_token_id < vocab_size:
        wrong.append(f"mask token {layout.mask_token_id}, {vocab_size} tokens in the target")
    if wrong:
        raise InputError(
            f"the drafter {drafter} does not fit the target {target}: {'; '.join(wrong)}"
        )
    return layout


def check_served_drafter(vllm_config: "VllmConfig", needed: Collection[str] = ()) -> DrafterLayout:
    """Returns the layout of the drafter that a server is told to use. Logs a warning if it is to
    draft more tokens than it was trained for. Raises InputError if its config is not complete
    or lacks one of the keys `needed`, or if it does not fit the target."""
    speculation, target = vllm_config.speculative_config, vllm_config.model_config
    draft, num_drafted = speculation.draft_model_config, speculation.num_speculative_tokens
    # vLLM's configuration of a drafter lacks the block size.
    config = get_hf_file_to_dict("config.json", draft.model, draft.revision)
    layout = check_drafter(
        config or draft.hf_config.to_dict(),
        target.hf_config.to_dict(),
        draft.model,
        target.model,
        needed,
    )
    if layout.block_size is not None and num_drafted > layout.block_size - 1:
        # Not refused: published commands ask for a whole block, and answers stay the target's.
        logger.warning_once(
            "num_speculative_tokens of --speculative-config is %d, but the drafter %s was trained "
            "with blocks of %d, the anchor and %d drafted tokens. Those beyond may be worse.",
            num_drafted,
            draft.model,
            layout.block_size,
            layout.block_size - 1,
        )
    return layout


def extend_positions(vllm_config: "VllmConfig") -> None:
    """Gives the drafter rotary positions for the longest request, as vLLM 0.33 does: changes the
    drafter's configuration in place. Kernels would read beyond the end of a shorter table. Raises
    InputError if a longer table would rotate otherwise."""
    draft = vllm_config.speculative_config.draft_model_config
    config, needed = draft.hf_config, vllm_config.model_config.max_model_len
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in TABLE_ROPES:
        config.max_position_embeddings = max(config.max_position_embeddings, needed)
    elif draft.max_model_len < needed:
        raise InputError(
            f"the drafter {draft.model} has positions for {draft.max_model_len} tokens, and a "
            f"request may have {needed}. Start with --max-model-len {draft.max_model_len}, or "
            f"without the drafter."
        )


def set_draft_window(draft_model_config: Any, window: int) -> None:
    """Changes the drafter's configuration in place: it sees the last `window` tokens and its block.
    vLLM manages its cache like that of layers with a sliding window. Raises ValueError if the
    drafter was made for a narrower window, or if only some of its layers have one: vLLM would leave
    the others as they are."""
    hf_config = draft_model_config.hf_config
    if len(kinds := set(getattr(hf_config, "layer_types", None) or ())) > 1:
        raise ValueError(
            f"drafter.draft_window is not possible with the drafter {draft_model_config.model}, "
            f"whose layers see different tokens ({', '.join(sorted(kinds))}). Leave it out."
        )
    settings = dict(getattr(hf_config, "dflash_config", None) or {})
    own = settings.get("swa_window_size") or getattr(hf_config, "sliding_window", None)
    if own is not None and own < window:
        raise ValueError(
            f"drafter.draft_window is {window}, but the drafter {draft_model_config.model} was "
            f"made for a window of {own}. Lower it or leave it out."
        )
    logger.info("The drafter sees the last %d tokens.", window)
    hf_config.dflash_config = settings | {"use_swa": True, "swa_window_size": window}

"""Reads the config of a DFlash drafter, and checks that the drafter fits its target.

Drafters come in two layouts. z-lab's keep `dflash_config` next to Qwen3's own fields; RedHatAI's,
written by the `speculators` library, keep those under `transformer_layer_config` and count the
target's layers from the embedding, so that its `aux_hidden_state_layer_ids` are one higher than
`target_layer_ids`. Layer ids here are z-lab's: i is the output of the target's layer i, from 0.

A block has one slot more than it drafts tokens: the anchor.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

PADDING = 1024  # tokens that a target's vocabulary may be padded by beyond its drafter's


class DrafterMismatch(ValueError):
    """Drafter, target and settings do not belong together; one line for the user."""


@dataclass(frozen=True)
class DrafterLayout:
    """The parts of a drafter's config that must fit something else."""

    num_layers: int
    block_size: int | None  # None, here and below: the config does not say
    mask_token_id: int
    target_layer_ids: tuple[int, ...] | None
    hidden_size: int  # of the target's states
    vocab_size: int  # of the target
    num_target_layers: int | None


def read_layout(
    config: Mapping[str, Any],  # a drafter's config.json, in either layout
    name: str,
    needed: Collection[str] = (),  # more keys that a drafter of this kind has
) -> DrafterLayout:
    """Reads a drafter's config. Raises DrafterMismatch if it is not that of a DFlash drafter, or
    not complete."""
    is_speculators = "transformer_layer_config" in config
    inner = config["transformer_layer_config"] if is_speculators else config
    options = config if is_speculators else {**config, **(config.get("dflash_config") or {})}
    if missing := [key for key in needed if options.get(key) is None]:
        raise DrafterMismatch(
            f"{name} is not complete: expected {', '.join(missing)} in its config, in z-lab's "
            f"layout (dflash_config) or that of speculators (transformer_layer_config)"
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
        raise DrafterMismatch(
            f"{name} is not a DFlash drafter: expected {error.args[0]} in its config, in z-lab's "
            f"layout (dflash_config) or that of speculators (transformer_layer_config)"
        ) from None


def check_drafter(
    drafter_config: Mapping[str, Any],
    target_config: Mapping[str, Any],  # the target's config.json
    drafter: str,  # names or paths
    target: str,
    needed: Collection[str] = (),  # keys, as in `read_layout`
) -> DrafterLayout:
    """Returns the drafter's layout.

    Raises:
        DrafterMismatch: the drafter does not fit the target; names all differences.
    """
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
        raise DrafterMismatch(
            f"the drafter {drafter} does not fit the target {target}: {'; '.join(wrong)}"
        )
    return layout

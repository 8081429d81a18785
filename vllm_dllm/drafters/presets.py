"""Published DFlash drafters, and whether a drafter, a target and a preset belong together.

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
class Preset:
    drafter: str
    target: str
    num_layers: int | None  # None: sources differ
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    hidden_size: int  # of the target's states
    vocab_size: int  # of the target
    num_target_layers: int
    source: str
    """Where the numbers were read (copies of the configs; the repositories themselves were out of
    reach). Repositories are GitHub's, model cards Hugging Face's."""


PRESETS = (
    Preset(
        "z-lab/Qwen3-4B-DFlash-b16",
        "Qwen/Qwen3-4B",
        None,
        16,
        151669,
        (1, 9, 17, 25, 33),
        2560,
        151936,
        36,
        "sgl-project/SpecForge configs/qwen3-4b-dflash.json, whose five layers are four in the TPU "
        "port's report; the report has the same layer ids",
    ),
    Preset(
        "z-lab/Qwen3-8B-DFlash-b16",
        "Qwen/Qwen3-8B",
        5,
        16,
        151669,
        (1, 9, 17, 25, 33),
        4096,
        151936,
        36,
        "sgl-project/SpecForge configs/qwen3-8b-dflash.json; mask and layer ids: NVIDIA NeMo-RL's "
        "tests of drafters for this target; layout: InternLM/lmdeploy pull request 4789",
    ),
    Preset(
        "z-lab/Qwen3-Coder-30B-A3B-DFlash",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        8,
        16,
        151669,
        (1, 12, 23, 34, 45),
        2048,
        151936,
        48,
        "a public GGUF converter that cites the drafter's config.json; ZinYY/AdaFlash issue 1",
    ),
    Preset(
        "z-lab/Qwen3.5-9B-DFlash",
        "Qwen/Qwen3.5-9B",
        5,
        16,
        248070,
        (1, 8, 15, 22, 29),
        4096,
        248320,
        32,
        "card of guglxni/Qwen3.5-9B-abliterated-DFlash, fine-tuned from it; hipfire's converter",
    ),
    Preset(
        "z-lab/Qwen3.6-27B-DFlash",
        "Qwen/Qwen3.6-27B",
        5,
        16,
        248070,
        (1, 16, 31, 46, 61),
        5120,
        248320,
        64,
        "Tenstorrent's and another engine's tests of its config",
    ),
    Preset(
        "z-lab/gemma-4-31B-it-DFlash",
        "google/gemma-4-31B-it",
        5,
        16,
        4,
        (1, 12, 23, 35, 46, 57),
        5376,
        262144,
        60,
        "card of Lucebox/gemma-4-31B-it-DFlash-GGUF, converted from it",
    ),
    Preset(
        "z-lab/gpt-oss-20b-DFlash",
        "openai/gpt-oss-20b",
        8,
        8,
        200000,
        (1, 6, 11, 16, 21),
        2880,
        201088,
        24,
        "its config.json of 2026-04-20, in the tests of an MLX Swift port",
    ),
    Preset(
        "z-lab/gpt-oss-120b-DFlash",
        "openai/gpt-oss-120b",
        8,
        10,
        200000,
        (1, 9, 17, 25, 33),
        2880,
        201088,
        36,
        "its config in the tests of a llama.cpp converter and of MoE-Infinity",
    ),
    Preset(
        "RedHatAI/Qwen3-8B-speculator.dflash",
        "Qwen/Qwen3-8B",
        5,
        8,
        151669,
        (1, 9, 17, 25, 33),
        4096,
        151936,
        36,
        "its config (aux_hidden_state_layer_ids 2, 10, 18, 26, 34) in another trainer's tests",
    ),
)


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
    """Raises DrafterMismatch if the config is not a DFlash drafter's, or not complete."""
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


def find_preset(drafter: str) -> Preset | None:
    """Finds it by repository, or by the last part of a local path with a repository's name."""
    name = drafter.rstrip("/").rsplit("/", 1)[-1].lower()
    return next((p for p in PRESETS if p.drafter.rsplit("/", 1)[-1].lower() == name), None)


def check_drafter(
    drafter_config: Mapping[str, Any],
    target_config: Mapping[str, Any],  # the target's config.json
    drafter: str,  # names or paths
    target: str,
    needed: Collection[str] = (),  # keys, as in `read_layout`
) -> DrafterLayout:
    """The drafter's layout, if it fits the target, and the preset if there is one.

    Raises:
        DrafterMismatch: naming both sides of everything that does not fit.
    """
    layout = read_layout(drafter_config, drafter, needed)
    preset = find_preset(drafter)
    if preset is not None:
        _check_preset(layout, preset, drafter)
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
        made_for = f"; {preset.drafter} is made for {preset.target}" if preset else ""
        raise DrafterMismatch(
            f"the drafter {drafter} does not fit the target {target}: {'; '.join(wrong)}{made_for}"
        )
    return layout


def _check_preset(layout: DrafterLayout, preset: Preset, drafter: str) -> None:
    wrong = []
    for what in DrafterLayout.__dataclass_fields__:
        ours, published = getattr(layout, what), getattr(preset, what)
        if None not in (ours, published) and ours != published:
            wrong.append(f"{what} {ours}, published with {published}")
    if wrong:
        raise DrafterMismatch(
            f"{drafter} has the name of the published {preset.drafter} but another config: "
            f"{'; '.join(wrong)}. Download it again, or give a drafter of your own another name"
        )

"""Drafters, targets and presets that belong together, and the errors of those that do not."""

from dataclasses import asdict
from typing import Any

import pytest

from vllm_dllm.drafters.presets import (
    PRESETS,
    DrafterMismatch,
    Preset,
    check_drafter,
    find_preset,
    read_layout,
)

PUBLISHED = pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.drafter)


def z_lab(preset: Preset) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "block_size": preset.block_size,
        "dflash_config": {
            "mask_token_id": preset.mask_token_id,
            "target_layer_ids": list(preset.target_layer_ids),
        },
        "hidden_size": preset.hidden_size,
        "num_hidden_layers": preset.num_layers or 5,
        "num_target_layers": preset.num_target_layers,
        "vocab_size": preset.vocab_size,
    }


def speculators(preset: Preset) -> dict[str, Any]:
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [i + 1 for i in preset.target_layer_ids],
        "block_size": preset.block_size,
        "draft_vocab_size": 32000,
        "mask_token_id": preset.mask_token_id,
        "transformer_layer_config": {
            "hidden_size": preset.hidden_size,
            "num_hidden_layers": preset.num_layers or 5,
            "vocab_size": preset.vocab_size,
        },
    }


def target(preset: Preset) -> dict[str, Any]:
    return {
        "hidden_size": preset.hidden_size,
        "num_hidden_layers": preset.num_target_layers,
        "vocab_size": preset.vocab_size,
    }


LAYOUTS = {"z-lab": z_lab, "speculators": speculators}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
QWEN3_8B = find_preset("z-lab/Qwen3-8B-DFlash-b16")


@pytest.mark.slow
@PUBLISHED
@LAYOUT
def test_both_layouts_say_the_same(preset: Preset, layout: str) -> None:
    config = LAYOUTS[layout](preset)
    read = check_drafter(config, target(preset), preset.drafter, preset.target)
    known = asdict(read) | {"num_target_layers": preset.num_target_layers}
    if preset.num_layers is None:
        known["num_layers"] = None
    assert known == {name: getattr(preset, name) for name in known}


@PUBLISHED
def test_presets_fit_themselves(preset: Preset) -> None:
    """A slip of the pen in a preset: layers that its target lacks, a mask beyond its vocabulary."""
    assert list(preset.target_layer_ids) == sorted(set(preset.target_layer_ids))
    assert preset.target_layer_ids[-1] < preset.num_target_layers
    assert 0 <= preset.mask_token_id < preset.vocab_size
    assert find_preset(preset.drafter) is preset


def test_options_may_be_inside_dflash_config() -> None:
    """Newer drafters of z-lab's keep the block size there."""
    config = z_lab(QWEN3_8B)
    config["dflash_config"]["block_size"] = config.pop("block_size")
    assert read_layout(config, "D").block_size == 16


def test_multimodal_target() -> None:
    check_drafter(z_lab(QWEN3_8B), {"text_config": target(QWEN3_8B)}, "D", "T")


WRONG_TARGETS = {
    "hidden size": ({"hidden_size": 2560}, "hidden size: 4096 in the drafter, 2560 in the target"),
    "vocabulary": (
        {"vocab_size": 248320},
        "vocabulary: 151936 in the drafter, 248320 in the target",
    ),
    "layers": (
        {"num_hidden_layers": 28},
        r"layer ids \[33\] of the drafter, layers 0 to 27 in the target",
    ),
    "mask": ({"vocab_size": 151669}, "mask token 151669, 151669 tokens in the target"),
}


@pytest.mark.parametrize("case", WRONG_TARGETS)
@LAYOUT
def test_another_target(layout: str, case: str) -> None:
    changes, message = WRONG_TARGETS[case]
    with pytest.raises(DrafterMismatch, match=f"drafter D does not fit the target T: .*{message}"):
        check_drafter(LAYOUTS[layout](QWEN3_8B), target(QWEN3_8B) | changes, "D", "T")


def test_another_target_of_a_published_drafter() -> None:
    name = "models/Qwen3-8B-DFlash-b16/"
    with pytest.raises(
        DrafterMismatch, match="z-lab/Qwen3-8B-DFlash-b16 is made for Qwen/Qwen3-8B"
    ):
        check_drafter(z_lab(QWEN3_8B), target(QWEN3_8B) | {"hidden_size": 2560}, name, "T")


def test_another_config_under_a_published_name() -> None:
    config = z_lab(QWEN3_8B) | {"block_size": 32}
    with pytest.raises(DrafterMismatch, match="block_size 32, published with 16"):
        check_drafter(config, target(QWEN3_8B), QWEN3_8B.drafter, "T")


@pytest.mark.parametrize("size", [151936 - 128, 151936])
def test_a_targets_vocabulary_may_be_padded_further(size: int) -> None:
    check_drafter(z_lab(QWEN3_8B) | {"vocab_size": size}, target(QWEN3_8B), "D", "T")


def test_what_a_config_may_leave_out() -> None:
    config = z_lab(QWEN3_8B)
    del config["block_size"], config["dflash_config"]["target_layer_ids"]
    layout = check_drafter(config, target(QWEN3_8B), "D", "T")
    assert (layout.block_size, layout.target_layer_ids) == (None, None)


@pytest.mark.parametrize("missing", ["dflash_config", "vocab_size"])
def test_not_a_drafter(missing: str) -> None:
    config = z_lab(QWEN3_8B)
    del config[missing]
    expected = "mask_token_id" if missing == "dflash_config" else missing
    with pytest.raises(DrafterMismatch, match=f"D is not a DFlash drafter: expected {expected} in"):
        read_layout(config, "D")

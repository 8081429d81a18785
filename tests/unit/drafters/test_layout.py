"""Drafters and targets that belong together, files that are what their config says, and the errors
of those that do not."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import qwen3_dflash

from tests.engine.drafters import DRAFTER, TARGET, make_dflash2
from tests.engines import one_rank
from vllm_dllm import plugin
from vllm_dllm.drafters import layout
from vllm_dllm.drafters.dflash import DFLASH2_KEYS, check_narrow_draft
from vllm_dllm.drafters.layout import (
    DrafterLayout,
    check_drafter,
    check_served_drafter,
    extend_positions,
    read_layout,
    set_draft_window,
)
from vllm_dllm.drafters.model import CompleteDrafter, DFlash2DraftModel, DFlashDraftModel
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.checked_weights import weights_in_parts
from vllm_dllm.quantization.tensor_specs import list_tensors

# z-lab/Qwen3-8B-DFlash-b16, for Qwen/Qwen3-8B; configs/qwen3-8b-dflash.json of
# sgl-project/SpecForge.
QWEN3_8B = DrafterLayout(
    num_layers=5,
    block_size=16,
    mask_token_id=151669,
    target_layer_ids=(1, 9, 17, 25, 33),
    hidden_size=4096,
    vocab_size=151936,
    num_target_layers=36,
)
QWEN3_8B_TARGET = {"hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936}


def z_lab() -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "hidden_size": 4096,
        "num_hidden_layers": 5,
        "num_target_layers": 36,
        "vocab_size": 151936,
    }


def speculators() -> dict[str, Any]:
    """The keys of RedHatAI/Qwen3-8B-speculator.dflash."""
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "block_size": 16,
        "draft_vocab_size": 32000,
        "mask_token_id": 151669,
        "num_target_layers": 36,
        "transformer_layer_config": {
            "hidden_size": 4096,
            "num_hidden_layers": 5,
            "vocab_size": 151936,
        },
    }


LAYOUTS = {"z-lab": z_lab, "speculators": speculators}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


@LAYOUT
def test_both_layouts_say_the_same(layout: str) -> None:
    assert check_drafter(LAYOUTS[layout](), QWEN3_8B_TARGET, "D", "T") == QWEN3_8B


def test_options_may_be_inside_dflash_config() -> None:
    """Newer drafters of z-lab's keep the block size there."""
    config = z_lab()
    config["dflash_config"]["block_size"] = config.pop("block_size")
    assert read_layout(config, "D").block_size == 16


@pytest.mark.parametrize("key", ["sample_from_anchor", "query_zero_predicts_next"])
def test_an_anchor_that_predicts(key: str) -> None:
    """vLLM refuses one key in one place, and drafts with the others one token off."""
    inside, beside, flat = z_lab(), z_lab(), speculators()
    inside["dflash_config"][key] = beside[key] = flat[key] = True
    for config in (inside, beside, flat):
        with pytest.raises(InputError, match=rf"D predicts .* anchor \({key} in its config\)"):
            read_layout(config, "D")
    beside[key] = False
    read_layout(beside, "D")


def test_multimodal_target() -> None:
    check_drafter(z_lab(), {"text_config": QWEN3_8B_TARGET}, "D", "T")


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
    with pytest.raises(InputError, match=f"drafter D does not fit the target T: .*{message}"):
        check_drafter(LAYOUTS[layout](), QWEN3_8B_TARGET | changes, "D", "T")


@pytest.mark.parametrize("size", [151936 - 128, 151936])
def test_a_targets_vocabulary_may_be_padded_further(size: int) -> None:
    check_drafter(z_lab() | {"vocab_size": size}, QWEN3_8B_TARGET, "D", "T")


def test_what_a_config_may_leave_out() -> None:
    config = z_lab()
    del config["block_size"], config["dflash_config"]["target_layer_ids"]
    layout = check_drafter(config, QWEN3_8B_TARGET, "D", "T")
    assert (layout.block_size, layout.target_layer_ids) == (None, None)


@pytest.mark.parametrize("missing", ["dflash_config", "vocab_size"])
def test_not_a_drafter(missing: str) -> None:
    config = z_lab()
    del config[missing]
    expected = "mask_token_id" if missing == "dflash_config" else missing
    with pytest.raises(InputError, match=f"D is not a DFlash drafter: expected {expected} in"):
        read_layout(config, "D")


FULL, SLIDING = "full_attention", "sliding_attention"


def served(*layer_types: str, **dflash_config: Any) -> Any:
    """A drafter as vLLM has configured it. Sliding layers are causal, as in z-lab's for Gemma,
    unless `dflash_config` says otherwise."""
    window = {"use_sliding_window": True, "sliding_window": 64} if SLIDING in layer_types else {}
    return SimpleNamespace(
        model="D",
        hf_config=Qwen3Config(
            num_hidden_layers=len(layer_types),
            layer_types=list(layer_types),
            dflash_config={"mask_token_id": 5} | dflash_config,
            **window,
        ),
    )


@pytest.mark.parametrize(
    ("drafter", "causal"),
    [
        (served(FULL, FULL), False),
        (served(SLIDING, SLIDING), True),
        (served(SLIDING, SLIDING, causal=False), False),
        (served(FULL, FULL, causal=True), True),  # as JetSpec's
    ],
)
def test_a_window_leaves_a_drafters_causality_as_it_was_trained(drafter: Any, causal: bool) -> None:
    set_draft_window(drafter, 32)
    assert [qwen3_dflash._resolve_layer_attention(drafter.hf_config, i) for i in range(2)] == [
        (32, causal)
    ] * 2


def test_layers_that_differ_have_no_window_in_common() -> None:
    """vLLM gives the window to those that have one."""
    with pytest.raises(ValueError, match=r"draft_window is not possible .* D, .*full_.*sliding_"):
        set_draft_window(served(SLIDING, FULL), 32)


def test_causal_layers_do_not_draft_narrower() -> None:
    """A causal drafter emitted 2.3 tokens a verification with it, and 5.3 without."""
    check_narrow_draft(served(FULL, FULL))
    check_narrow_draft(served(SLIDING, FULL, causal=False))
    for drafter in (served(SLIDING, FULL), served(FULL, FULL, causal=True)):
        with pytest.raises(ValueError, match="narrow_draft is not possible with the drafter D"):
            check_narrow_draft(drafter)


Build = Callable[[type[CompleteDrafter], Path], CompleteDrafter]


def configured(drafter: Path, num_drafted: int = 15, **options: Any) -> VllmConfig:
    """vLLM's, of a server of the target with this drafter."""
    speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": num_drafted}
    return EngineArgs(
        str(TARGET), skip_tokenizer_init=True, speculative_config=speculative, **options
    ).create_engine_config()


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    plugin.register()

    def make(model_class: type[CompleteDrafter], path: Path) -> CompleteDrafter:
        config = configured(path, dtype="float32", enforce_eager=True)
        with set_current_vllm_config(config):
            return model_class(vllm_config=config)

    with one_rank(tmp_path):
        yield make


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [DFlashDraftModel, DFlash2DraftModel])
def test_a_missing_or_smaller_tensor_is_named(
    build: Build, tmp_path: Path, model_class: type[CompleteDrafter]
) -> None:
    path = DRAFTER if model_class is DFlashDraftModel else make_dflash2(tmp_path / "drafter")
    model, weights = build(model_class, path), load_file(path / "model.safetensors")
    model.load_weights(weights.items())
    for name in weights:
        if ".layers.2" not in name:
            left = {key: weight for key, weight in weights.items() if key != name}
            with pytest.raises(ValueError, match=re.escape(f"no weights for {name}. Check")):
                model.load_weights(left.items())
            smaller = weights | {name: weights[name][:-1]}
            with pytest.raises(ValueError, match=rf"at {re.escape(name)} .*: its shape must be "):
                model.load_weights(smaller.items())
    with weights_in_parts():
        for part in weights.items():
            model.load_weights([part])


@pytest.mark.slow
def test_sinks_and_a_smaller_vocabulary_are_loaded(build: Build, tmp_path: Path) -> None:
    """Ranks share a drafter's sinks by its own loader. A table names the vocabulary's tokens."""
    config = json.loads((DRAFTER / "config.json").read_text())
    size, heads = config["vocab_size"] - 64, config["num_attention_heads"]
    config["dflash_config"] |= {"attention_sink_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": size}))
    weights = load_file(DRAFTER / "model.safetensors") | {
        "d2t": torch.zeros(size, dtype=torch.int64),
        "lm_head.weight": torch.ones(size, config["hidden_size"]),
    }
    weights |= {
        f"layers.{i}.self_attn.attention_sink_bias": torch.ones(heads)
        for i in range(config["num_hidden_layers"])
    }
    save_file(weights, tmp_path / "model.safetensors")
    model = build(DFlashDraftModel, tmp_path)
    model.load_weights(weights.items())
    sinks = [spec for name, spec in list_tensors(model) if name.endswith("sink_bias")]
    assert sinks and all(spec.shape is None for spec in sinks)


@pytest.mark.slow
def test_logits_are_capped_as_the_config_says(build: Build, tmp_path: Path) -> None:
    """Those of z-lab's drafters for Gemma targets are."""
    assert build(DFlashDraftModel, DRAFTER).logits_processor.soft_cap is None
    config = json.loads((DRAFTER / "config.json").read_text()) | {"final_logit_softcapping": 30.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert build(DFlashDraftModel, tmp_path).logits_processor.soft_cap == 30.0


def test_missing_keys_are_named(tmp_path: Path) -> None:
    config = json.loads((make_dflash2(tmp_path) / "config.json").read_text())
    target = json.loads((TARGET / "config.json").read_text())
    check_drafter(config, target, "drafter", "target", DFLASH2_KEYS)
    for key in DFLASH2_KEYS[1:3]:
        del config["dflash_config"][key]
    with pytest.raises(InputError, match="expected conv_group_size, selector_rank in its"):
        check_drafter(config, target, "drafter", "target", DFLASH2_KEYS)


@pytest.mark.parametrize(("num_drafted", "warns"), [(15, False), (16, True)])
def test_more_tokens_than_were_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_drafted: int, warns: bool
) -> None:
    """A warning says so. vLLM's own test of DFlash asks for 16 with blocks of 16."""
    config = configured(make_dflash2(tmp_path), num_drafted)
    warnings: list[str] = []
    monkeypatch.setattr(
        layout.logger, "warning_once", lambda text, *values: warnings.append(text % values)
    )
    check_served_drafter(config, DFLASH2_KEYS)
    assert len(warnings) == warns
    assert not warns or ("is 16, but the drafter" in warnings[0] and "blocks of 16" in warnings[0])


@pytest.mark.parametrize("rope_type", ["default", "yarn"])
def test_requests_longer_than_the_drafters_positions(tmp_path: Path, rope_type: str) -> None:
    """The table of positions grows, or the server does not start: vLLM 0.32 would read beyond it,
    and 0.33 lowers the limit of requests."""
    path = make_dflash2(tmp_path)
    settings = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 256}
    if rope_type == "yarn":
        settings["rope_parameters"] |= {"rope_type": "yarn", "factor": 2.0}
        settings["rope_parameters"] |= {"original_max_position_embeddings": 128}
    (path / "config.json").write_text(json.dumps(settings))
    config = configured(path)
    config.model_config.max_model_len = 2048
    draft = config.speculative_config.draft_model_config.hf_config
    if rope_type == "yarn":
        with pytest.raises(InputError, match="positions for 256 tokens, and a"):
            extend_positions(config)
    else:
        extend_positions(config)
        assert draft.max_position_embeddings == 2048

"""A drafter whose files are not what its config says is not served."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from tests.engine.drafters import DRAFTER, TARGET, make_dflash2
from tests.engines import one_rank
from vllm_dllm import plugin
from vllm_dllm.drafters import layout
from vllm_dllm.drafters.dflash import DFLASH2_KEYS
from vllm_dllm.drafters.layout import (
    check_drafter,
    check_served_drafter,
    extend_positions,
)
from vllm_dllm.drafters.model import CompleteDrafter, DFlash2DraftModel, DFlashDraftModel
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.complete_weights import weights_in_parts

Build = Callable[[type[CompleteDrafter], Path], CompleteDrafter]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    plugin.register()

    def make(model_class: type[CompleteDrafter], path: Path) -> CompleteDrafter:
        config = EngineArgs(
            str(TARGET),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            speculative_config={
                "method": "dflash",
                "model": str(path),
                "num_speculative_tokens": 15,
            },
        ).create_engine_config()
        with set_current_vllm_config(config):
            return model_class(vllm_config=config)

    with one_rank(tmp_path):
        yield make


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [DFlashDraftModel, DFlash2DraftModel])
def test_a_missing_tensor_is_named(
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
    with weights_in_parts():
        for part in weights.items():
            model.load_weights([part])


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
    config = EngineArgs(
        str(TARGET),
        skip_tokenizer_init=True,
        speculative_config={
            "method": "dflash",
            "model": str(make_dflash2(tmp_path)),
            "num_speculative_tokens": num_drafted,
        },
    ).create_engine_config()
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
    speculative = {"method": "dflash", "model": str(path), "num_speculative_tokens": 15}
    config = EngineArgs(
        str(TARGET), skip_tokenizer_init=True, speculative_config=speculative
    ).create_engine_config()
    config.model_config.max_model_len = 2048
    draft = config.speculative_config.draft_model_config.hf_config
    if rope_type == "yarn":
        with pytest.raises(InputError, match="positions for 256 tokens, and a"):
            extend_positions(config)
    else:
        extend_positions(config)
        assert draft.max_position_embeddings == 2048

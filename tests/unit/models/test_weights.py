"""The weight map: every name of transformers' state dict, at the full 26B shape, bad files, weights
that are no numbers, the benches' checkpoints without weights, and a row of rotations for each
position."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    Gemma4VisionConfig,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from bench import dummy_checkpoint
from bench.dummy_checkpoint import SHAPE_26B
from checkpoints.recipes.architecture import build_generation_config
from checkpoints.recipes.tiny import make_tiny_checkpoint
from checkpoints.recipes.tokenizer import build_tokenizer
from tests.unit.models.building import build
from vllm_dllm.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion as ServedModel
from vllm_dllm.models.diffusion_gemma import num_rotary_positions
from vllm_dllm.quantization.checked_weights import describe_wrong_numbers, weights_in_parts


@pytest.mark.slow
@pytest.mark.parametrize("moe", [True, False], ids=["moe", "dense"])
@pytest.mark.parametrize("vision", ["served", "left-out", "absent"])
def test_every_name_of_the_26b_state_dict(tmp_path: Path, moe: bool, vision: str) -> None:
    """The vision tower's too, where images are served."""
    shape = dict(SHAPE_26B)
    if not moe:
        shape |= {"num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}
    text_config = DiffusionGemmaTextConfig(**shape)
    tower = Gemma4VisionConfig(standardize=True, use_clipped_linears=True)  # all names there are
    config = DiffusionGemmaConfig(text_config=text_config, vision_config=tower)
    with torch.device("meta"):
        state_dict = transformers_state_dict(config)
    if vision == "absent":
        config.vision_config = None
        state_dict = {
            name: weight
            for name, weight in state_dict.items()
            if ".vision_tower." not in name and ".embed_vision." not in name
        }
    config.architectures = ["DiffusionGemmaForBlockDiffusion"]
    config.save_pretrained(tmp_path)
    build_generation_config(256).save_pretrained(tmp_path)
    if vision == "served":
        Gemma4ImageProcessorPil().save_pretrained(tmp_path)
        build_tokenizer().save_pretrained(tmp_path)

    model, _ = build(tmp_path, "meta", dtype="bfloat16", images=vision == "served")
    # The two modes' scalars are compared, which takes values.
    scalars = {name: torch.ones(1) for name in state_dict if name.endswith("layer_scalar")}
    loaded = model.load_weights(iter((state_dict | scalars).items()))
    assert {n for n, _ in model.named_parameters()} | saved_buffers(model) == loaded
    of_tower = {name for name in state_dict if "vision" in name}
    served = {name for name in loaded if "vision" in name}
    assert len(served) == (len(of_tower) if vision == "served" else 0)
    assert bool(of_tower) == (vision != "absent")


def saved_buffers(model: torch.nn.Module) -> set[str]:
    is_saved = re.compile(r".*layer_scalar|vision_tower\..*(put_min|put_max|std_bias|std_scale)")
    return {name for name, _ in model.named_buffers() if is_saved.fullmatch(name)}


def transformers_state_dict(config: DiffusionGemmaConfig) -> dict[str, torch.Tensor]:
    """All names of transformers' model on the meta device; tied weights under each of theirs.

    transformers 5.19 has no dense layers, although its config allows them: the dense map is the
    MoE map without the names of router, experts and the norms around them.
    """
    moe = config.text_config.num_experts is not None
    if not moe:
        config.text_config.num_experts, config.text_config.top_k_experts = 2, 1
        config.text_config.moe_intermediate_size = 32
    state_dict = DiffusionGemmaForBlockDiffusion(config).state_dict()
    if moe:
        return state_dict
    config.text_config.num_experts = config.text_config.top_k_experts = None
    config.text_config.moe_intermediate_size = None
    of_moe = (".router.", ".experts.", "feedforward_layernorm_1.", "feedforward_layernorm_2.")
    return {
        name: weight
        for name, weight in state_dict.items()
        if not any(part in name for part in of_moe)
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ServedModel, dict[str, torch.Tensor]]:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    state_dict = DiffusionGemmaForBlockDiffusion.from_pretrained(
        path, dtype=torch.float32
    ).state_dict()
    return build(path, "cpu")[0], state_dict


def test_misshapen_weight_is_named(tiny: tuple[ServedModel, dict[str, torch.Tensor]]) -> None:
    model, state_dict = tiny
    name = "model.decoder.layers.1.mlp.down_proj.weight"
    bad = state_dict | {name: state_dict[name][:, :-8]}
    with pytest.raises(ValueError, match=rf"at {name} of shape \[64, 56\]"):
        model.load_weights(iter(bad.items()))


def test_unknown_weight_is_named(tiny: tuple[ServedModel, dict[str, torch.Tensor]]) -> None:
    model, _ = tiny
    unknown = ("model.decoder.layers.0.novel_proj.weight", torch.ones(1))
    with pytest.raises(ValueError, match="novel_proj"):
        model.load_weights(iter([unknown]))


@pytest.mark.parametrize(
    "kind", ["layer_scalar", "mlp.down_proj.weight", "experts.gate_up_proj", "router.scale"]
)
def test_unequal_weights_of_encoder_and_decoder_are_refused(
    tiny: tuple[ServedModel, dict[str, torch.Tensor]], kind: str
) -> None:
    """One would replace the other."""
    model, state_dict = tiny
    name = f"model.decoder.layers.2.{kind}"
    bad = state_dict | {name: state_dict[name] + 1}
    with pytest.raises(ValueError, match="encoder and decoder must share them"):
        model.load_weights(iter(bad.items()))


def test_an_lm_head_that_only_the_outer_config_unties(tmp_path: Path) -> None:
    """It was left out, for the embeddings."""
    path = make_tiny_checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert config["text_config"]["tie_word_embeddings"]
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    reference = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32)
    state_dict = reference.state_dict()
    for name in state_dict:  # those of the encoder are not in the file, and not tied now
        if name.startswith("model.encoder.language_model."):
            decoder = name.replace("encoder.language_model", "decoder")
            state_dict[name] = state_dict.get(decoder, state_dict[name])
    head = torch.randn_like(state_dict["lm_head.weight"])
    model, _ = build(path, "cpu")
    model.load_weights(iter((state_dict | {"lm_head.weight": head}).items()))
    assert torch.equal(model.lm_head_shard(), head)


def test_unreadable_file_is_reported_with_its_place(
    tiny: tuple[ServedModel, dict[str, torch.Tensor]],
) -> None:
    model, state_dict = tiny
    first = next(iter(state_dict.items()))

    def truncated() -> Iterator[tuple[str, torch.Tensor]]:
        yield first
        raise OSError("file not fully covered")

    with pytest.raises(ValueError, match=f"after {first[0]}: file not fully covered"):
        model.load_weights(truncated())


def test_a_missing_package_is_no_fault_of_the_checkpoints(
    tiny: tuple[ServedModel, dict[str, torch.Tensor]],
) -> None:
    def read() -> Iterator[tuple[str, torch.Tensor]]:
        raise ModuleNotFoundError("No module named 'fastsafetensors'")
        yield

    with pytest.raises(ModuleNotFoundError, match="No module named 'fastsafetensors'"):
        tiny[0].load_weights(read())


@pytest.mark.parametrize("gone", ["mlp.down_proj.weight", "layer_scalar"])
def test_missing_weight_is_named(
    tiny: tuple[ServedModel, dict[str, torch.Tensor]], gone: str
) -> None:
    model, state_dict = tiny
    part = {
        name: weight for name, weight in state_dict.items() if not name.endswith(f"layers.1.{gone}")
    }
    assert len(part) < len(state_dict)
    with pytest.raises(ValueError, match=rf"model\.decoder\.layers\.1\.{re.escape(gone)}"):
        model.load_weights(iter(part.items()))
    with weights_in_parts():  # as a trainer sends them
        for one in state_dict.items():
            model.load_weights(iter([one]))


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_of_many(dtype: torch.dtype, value: float) -> None:
    weight = torch.ones(300, 70, dtype=dtype)
    assert describe_wrong_numbers("weight", weight) is None
    weight[299, 3] = value
    found = describe_wrong_numbers("weight", weight)
    assert found == f"its numbers must be finite, got 1 of 21000 that are not, the first {value}"


def test_infinities_that_cancel() -> None:
    found = describe_wrong_numbers("weight", torch.tensor([1.0, math.inf, -math.inf]))
    assert found is not None and "got 2 of 3" in found


def test_large_numbers_are_numbers() -> None:
    assert describe_wrong_numbers("weight", torch.full((4,), 3e38)) is None


def test_fp8() -> None:
    weight = torch.linspace(-448, 448, 100).to(torch.float8_e4m3fn)
    assert describe_wrong_numbers("weight", weight) is None
    for bits in (0x7F, 0xFF):
        wrong = weight.view(torch.uint8).clone()
        wrong[7] = bits
        found = describe_wrong_numbers("weight", wrong.view(torch.float8_e4m3fn))
        assert found is not None and "got 1 of 100 that are not, the first nan" in found


def test_what_holds_no_numbers() -> None:
    assert describe_wrong_numbers("weight", torch.full((4,), 255, dtype=torch.uint8)) is None
    assert describe_wrong_numbers("weight", torch.empty(4, device="meta")) is None
    assert describe_wrong_numbers("weight", torch.empty(0)) is None


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn], ids=str)
def test_scales(dtype: torch.dtype) -> None:
    scales = torch.full((30, 7), 0.5)
    scales[0, 0], scales[0, 1] = 448.0, 2.0**-9  # FP8's largest and smallest
    assert describe_wrong_numbers("weight_scale", scales.to(dtype)) is None
    for wrong in (0.0, -0.0, -0.5, math.nan, *(() if dtype.itemsize == 1 else (math.inf,))):
        scales[29, 3] = wrong
        found = describe_wrong_numbers("weight_scale", scales.to(dtype))
        assert found == f"it must only hold positive finite numbers, got {wrong}"
    scales[29, 3] = -0.5
    assert describe_wrong_numbers("weight", scales.to(dtype)) is None
    assert describe_wrong_numbers("weight_scale", torch.empty(0, dtype=dtype)) is None


CANVAS = 256  # served, of a checkpoint with shorter ones


def config(max_model_len: int, trained: int = 262_144) -> Any:
    return SimpleNamespace(
        diffusion_config=SimpleNamespace(canvas_length=CANVAS),
        model_config=SimpleNamespace(
            max_model_len=max_model_len,
            hf_config=SimpleNamespace(canvas_length=64),
            hf_text_config=SimpleNamespace(max_position_embeddings=trained),
        ),
    )


@pytest.mark.parametrize(
    ("max_model_len", "rows"), [(8192, 8192 + CANVAS), (262_000, 262_144), (262_144, 262_144)]
)
def test_a_canvas_more_than_the_context_and_no_more_than_trained(
    max_model_len: int, rows: int
) -> None:
    assert num_rotary_positions(config(max_model_len)) == rows


@pytest.mark.parametrize(
    ("scheme", "quantized"),
    [
        ("bf16", set()),
        ("fp8-dynamic", {"mlp", "experts", "self_attn"}),
        ("nvfp4", {"mlp", "experts"}),
        ("w4a16", {"mlp", "experts", "self_attn"}),
    ],
)
def test_a_folder_without_weights(tmp_path: Path, scheme: str, quantized: set[str]) -> None:
    """It becomes a model of the published size, in which the layers of the published checkpoints
    are quantised."""
    dummy_checkpoint.write(tmp_path, "26B", scheme, num_steps=16)
    assert not list(tmp_path.glob("*.safetensors"))
    assert AutoTokenizer.from_pretrained(tmp_path)("Sort: b a").input_ids
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["max_denoising_steps"] == 16

    model, _ = build(tmp_path, "meta", dtype="bfloat16")
    layers = [name.split(".") for name, _ in model.named_parameters() if ".layers." in name]
    assert {int(name[2]) for name in layers} == set(range(30))
    assert {name[3] for name in layers if "weight_scale" in name[-1]} == quantized

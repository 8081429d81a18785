"""ModelOpt's checkpoints, as vLLM's own methods and as compressed-tensors' read them. A
checkpoint that lacks a tensor is refused, and one that shares it is not."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.models.utils import WeightsMapper

from checkpoints.recipes.modelopt import EXCLUDED, convert
from tests.paths import CHECKPOINTS
from tests.unit.tools.quantize.quantized_files import files
from vllm_dllm import plugin
from vllm_dllm.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion
from vllm_dllm.quantization import modelopt
from vllm_dllm.quantization.checked_weights import load_checked
from vllm_dllm.quantization.schemes import IN_CHECKPOINT, list_linears
from vllm_dllm.tools.plan.capacity import read_shape

NVFP4 = CHECKPOINTS / "diffusiongemma-tiny-NVFP4"
SHIPPED = CHECKPOINTS / "diffusiongemma-tiny-ModelOpt-NVFP4"
EXPERTS = "model.decoder.layers.0.experts"


def read(weights: dict[str, torch.Tensor], algorithm: str = "NVFP4") -> dict[str, torch.Tensor]:
    return dict(modelopt.to_compressed_tensors_weights(weights.items(), algorithm, num_experts=8))


def test_the_shipped_one_is_the_other_converted(tmp_path: Path) -> None:
    convert(NVFP4, tmp_path / "out")
    shipped = files(SHIPPED)
    shipped.pop("README.md")
    assert files(tmp_path / "out") == shipped


def test_plan_counts_what_it_takes() -> None:
    assert read_shape(SHIPPED) == read_shape(NVFP4)


def test_read_as_compressed_tensors_wrote_it() -> None:
    """All to the bit, and what global scales are used as: a reciprocal's reciprocal may be off by a
    bit, but not that one's."""
    found = read(load_file(SHIPPED / "model.safetensors"))
    expected = load_file(NVFP4 / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.endswith("_global_scale"):
            assert torch.equal(found[name].reciprocal(), tensor.reciprocal()), name
            torch.testing.assert_close(found[name], tensor, rtol=2**-23, atol=0)
        else:
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize(
    "cache",
    [
        {"kv_cache_quant_algo": "FP8"},
        {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
    ],
)
def test_cpus_do_not_quantise_its_cache(cache: dict[str, Any], tmp_path: Path) -> None:
    plugin.register()
    folder = shutil.copytree(SHIPPED, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= cache
    (folder / "config.json").write_text(json.dumps(config))
    served = EngineArgs(str(folder), enforce_eager=True).create_engine_config()
    assert served.cache_config.cache_dtype == "auto"


@pytest.mark.parametrize("separator", ["_", "."])
def test_experts_in_one_tensor(separator: str) -> None:
    weights = load_file(SHIPPED / "model.safetensors")
    own = {name: weights[name] for name in weights if name.startswith(EXPERTS + ".")}
    for kind in modelopt.KINDS:  # gate and up then share their scales
        for expert in range(8):
            up = f"{EXPERTS}.{expert}.up_proj.{kind}"
            if own[up].dim() == 0:
                own[up] = own[f"{EXPERTS}.{expert}.gate_proj.{kind}"]
    fused = {}
    for kind in modelopt.KINDS:
        by_part = {
            part: torch.stack([own[f"{EXPERTS}.{e}.{part}.{kind}"] for e in range(8)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        both = by_part["gate_proj"]
        if both.dim() > 1:
            both = torch.cat((both, by_part["up_proj"]), dim=1)
        end = "" if kind == "weight" else separator + kind
        fused[f"{EXPERTS}.gate_up_proj{end}"] = both
        fused[f"{EXPERTS}.down_proj{end}"] = by_part["down_proj"]
    found, expected = read(fused), read(own)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_fp8() -> None:
    """A scale for all channels is each one's; those of inputs and of the cache are left out."""
    weight = torch.ones(6, 4).to(torch.float8_e4m3fn)
    found = read(
        {
            "a.k_proj.weight_scale": torch.tensor(0.5),
            "a.k_proj.weight": weight,
            "a.k_proj.input_scale": torch.tensor(2.0),
            "a.k_proj.k_scale": torch.tensor(2.0),
            "b.weight": weight,
            "b.weight_scale": torch.arange(6.0),
            "c.weight": torch.ones(3),
        },
        "FP8",
    )
    assert found.keys() == {
        f"{name}.{kind}" for name in ("a.k_proj", "b") for kind in ("weight", "weight_scale")
    } | {"c.weight"}
    assert found["a.k_proj.weight_scale"].tolist() == [[0.5]] * 6
    assert found["b.weight_scale"].tolist() == [[float(i)] for i in range(6)]


def of_config(**quantization: Any) -> Any:
    hf_config = SimpleNamespace(
        quantization_config=quantization,
        get_text_config=lambda: AutoConfig.from_pretrained(NVFP4).get_text_config(),
    )
    return SimpleNamespace(model="folder", hf_config=hf_config, quantization="modelopt_fp4")


PRODUCER = {"name": "modelopt"}


@pytest.mark.parametrize("algorithm", ["W4A8_AWQ", "MXFP4", "fp9", None])
def test_other_formats_are_refused_by_name(algorithm: str | None) -> None:
    for written in (
        {"quant_method": "modelopt", "quant_algo": algorithm},
        {"producer": PRODUCER, "quantization": {"quant_algo": algorithm}},
    ):
        with pytest.raises(ValueError, match=f"quant_algo of folder is {algorithm!r}: of ModelOpt"):
            modelopt.adapt_modelopt_config(of_config(**written))


def test_groups_of_another_size_are_refused() -> None:
    config = of_config(quant_method="modelopt", quant_algo="NVFP4", group_size=32)
    with pytest.raises(ValueError, match="group_size must be 16, got 32 in the NVFP4 of folder"):
        modelopt.adapt_modelopt_config(config)


@pytest.mark.parametrize("key", ["ignore", "exclude_modules"])
def test_what_is_excluded(key: str) -> None:
    """Of encoder and decoder, which share their layers; by names, ends of names and wildcards."""
    layers = "model.decoder.layers"
    excluded = {
        "model.encoder.language_model.layers.1.self_attn*": f"{layers}.1.self_attn.",
        f"{layers}.2.mlp.gate_proj": f"{layers}.2.mlp.gate_proj",
        f"{layers}.3.experts": f"{layers}.3.experts.",
        "*.4.mlp.*": f"{layers}.4.mlp.",
        "lm_head": "lm_head",
    }
    options = {"quant_algo": "nvfp4", key: list(excluded)}
    deeper = {"producer": PRODUCER, "quantization": options}
    config = of_config(**({"quant_method": "modelopt"} | options if key == "ignore" else deeper))
    text_config = config.hf_config.get_text_config()
    modelopt.adapt_modelopt_config(config)
    made = config.hf_config.quantization_config
    assert config.quantization == made["quant_method"] == "compressed-tensors"
    names = [IN_CHECKPOINT + name for name in list_linears(text_config)]
    assert made["config_groups"]["group_0"]["targets"] == [
        name for name in names if not name.startswith(tuple(excluded.values()))
    ]


def test_vllms_method_knows_our_names() -> None:
    """On GPUs. What the checkpoint leaves unquantised is so under the names of our layers."""
    written = {"quant_algo": "NVFP4", "quant_method": "modelopt", "ignore": list(EXCLUDED)}
    config = ModelOptNvFp4Config.from_config(written)
    config.packed_modules_mapping = DiffusionGemmaForBlockDiffusion.packed_modules_mapping
    config.apply_vllm_mapper(DiffusionGemmaForBlockDiffusion.hf_to_vllm_mapper)
    for name in (
        "lm_head",
        "model.layers.3.router.proj",
        "self_conditioning.gate_proj",
        "self_conditioning.down_proj",
        "vision_tower.encoder.layers.0.self_attn.q_proj.linear",
        "vision_tower.patch_embedder.input_proj",
        "embed_vision.embedding_projection",
    ):
        assert config.is_layer_excluded(name), name
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "moe.experts"):
        assert not config.is_layer_excluded(f"model.layers.3.{name}"), name


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_that_is_the_embeddings(is_tied: bool) -> None:
    """As `tie_word_embeddings` says: the checkpoint has one tensor for both."""
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(4, 2), "lm_head": nn.Linear(2, 4, False)})
    if is_tied:
        model["lm_head"].weight = model["embed_tokens"].weight
    weights = [("embed_tokens.weight", torch.empty(4, 2))]

    def load(checked: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in checked}

    if is_tied:
        load_checked(model, load, weights, WeightsMapper())
    else:
        with pytest.raises(ValueError, match=r"no weights for lm_head\.weight"):
            load_checked(model, load, weights, WeightsMapper())

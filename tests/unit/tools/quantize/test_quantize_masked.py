"""`vllm-dllm quantize` of masked models' checkpoints."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.masked import make_checkpoint
from tests.paths import CHECKPOINTS
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import TensorInfo
from vllm_dllm.tools.quantize.plan import make_plan
from vllm_dllm.tools.quantize.quantize import quantize
from vllm_dllm.tools.quantize.source import Source, read_source

SDAR = CHECKPOINTS / "sdar-tiny"


STORED = {"fp8-dynamic": torch.float8_e4m3fn, "int8": torch.int8, "w4a16": torch.int32}


@pytest.mark.parametrize("scheme", STORED)
@pytest.mark.parametrize(
    ("architecture", "num_linears", "ignored"),
    [
        ("SDARForCausalLM", 3 * 7, "lm_head"),
        ("SDARMoeForCausalLM", 3 * (4 + 3 * 8), "model.layers.1.mlp.gate"),
        ("LLaDA2MoeModelLM", 3 * (2 + 3) + 2 * 3 * 16, "model.layers.1.mlp.gate"),
        ("NemotronLabsDiffusionModel", 3 * 7, "diffusion_head"),
        ("Fast_dLLM_QwenForCausalLM", 3 * 7, "lm_head"),
    ],
)
def test_every_family(
    tmp_path: Path, architecture: str, num_linears: int, ignored: str, scheme: str
) -> None:
    source, _ = make_checkpoint(tmp_path / "source", 4, architecture)
    quantize(source, scheme, out := tmp_path / "quantised")
    weights = load_file(out / "model.safetensors")
    assert sum(w.dtype == STORED[scheme] for w in weights.values()) == num_linears
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert ignored in config["ignore"]


def test_what_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="takes --scheme fp8-dynamic, int8 or w4a16"):
        quantize(SDAR, "nvfp4", tmp_path / "NVFP4", CHECKPOINTS / "calibration.jsonl")
    assert not list(tmp_path.iterdir())


def test_rows_must_hold_whole_groups(tmp_path: Path) -> None:
    tensors = {"model.layers.0.self_attn.o_proj.weight": TensorInfo((64, 40), "BF16")}
    config = {"architectures": ["SDARForCausalLM"], "num_hidden_layers": 1}
    source = Source(tmp_path, config, {"model.safetensors": tensors}, has_index=False)
    with pytest.raises(InputError, match="width that is a multiple of 32, got 40"):
        make_plan("w4a16", source)


@pytest.mark.parametrize("gone", ["model.layers.3.", "model.layers.3.mlp.up_proj."])
def test_incomplete_layers(gone: str) -> None:
    source = read_source(SDAR)
    tensors = {name: t for name, t in source.tensors.items() if not name.startswith(gone)}
    with pytest.raises(InputError, match=f"has no tensor {re.escape(gone)}.*weight: expected all"):
        make_plan("int8", replace(source, shards={"model.safetensors": tensors}))

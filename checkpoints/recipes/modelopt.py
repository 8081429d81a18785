"""Writes an NVFP4 checkpoint of compressed-tensors as ModelOpt writes one:
python -m checkpoints.recipes.modelopt SOURCE OUT

The numbers are the same. ModelOpt's global scales multiply, so that each is the reciprocal of
compressed-tensors'. Like ModelOpt since 0.31, it describes the format in `config.json` and in
`hf_quant_config.json`.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

EXCLUDED = (
    "lm_head",
    "model.decoder.layers.*.router*",
    "model.decoder.self_conditioning*",
    "model.encoder.embed_vision*",
    "model.encoder.language_model.layers.*.router*",
    "model.encoder.vision_tower*",
)
PRODUCER = {"name": "modelopt", "version": "0.39.0"}
_KINDS = {
    "weight_packed": "weight",
    "weight_global_scale": "weight_scale_2",
    "input_global_scale": "input_scale",
}


def convert(source: Path, out: Path) -> None:
    """Raises ValueError if `source` is not in compressed-tensors' NVFP4."""
    config = json.loads((source / "config.json").read_text())
    layout = config.get("quantization_config", {}).get("format")
    if layout != "nvfp4-pack-quantized":
        raise ValueError(f"expected {source} in the format nvfp4-pack-quantized, got {layout}")
    config["quantization_config"] = _config()
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("README.md", "*.safetensors"))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": list(EXCLUDED),
    }
    separate = {"producer": PRODUCER, "quantization": quantization}
    (out / "hf_quant_config.json").write_text(json.dumps(separate, indent=2) + "\n")
    weights = load_file(source / "model.safetensors")
    renamed = dict(_convert(name, weight) for name, weight in weights.items())
    save_file(renamed, out / "model.safetensors", metadata={"format": "pt"})


def _config() -> dict[str, Any]:
    values = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"input_activations": values, "weights": values, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group},
        "ignore": list(EXCLUDED),
        "quant_algo": "NVFP4",
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }


def _convert(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    layer, _, kind = name.rpartition(".")
    if kind.endswith("_global_scale"):
        weight = weight.reciprocal().reshape(())
    return f"{layer}.{_KINDS.get(kind, kind)}", weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    convert(arguments.source, arguments.out)


if __name__ == "__main__":
    main()

"""The checkpoints of `bench.cpu_sizes`: random weights of a shape, in each format."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import dummy_checkpoint, harness
from vllm_dllm.tools.quantize.quantize import quantize

STEPS = 2  # a canvas, of transformers' `generate` while nvfp4 is calibrated
SHIPPED = harness.ROOT / "checkpoints" / "diffusiongemma-tiny"
PREPARED = {"nvfp4": "NVFP4"}  # its calibration takes long


@dataclass(frozen=True)
class Format:
    scheme: str | None
    """Of `vllm-dllm quantize`; None: bf16 on disk."""
    dtype: str
    """That it is served in."""


FORMATS = {
    "fp32": Format(None, "float32"),
    "bf16": Format(None, "bfloat16"),
    "fp8": Format("fp8-dynamic", "bfloat16"),
    "int8": Format("int8", "bfloat16"),
    "nvfp4": Format("nvfp4", "bfloat16"),
    "w4a16": Format("w4a16", "bfloat16"),
}


def make(folder: Path, shape: str, formats: list[str], **changed: Any) -> dict[str, Path]:
    """Format -> checkpoint."""
    plain = folder / "bf16"
    plain.mkdir()
    dummy_checkpoint.write(plain, shape, "bf16", STEPS, **changed)
    dummy_checkpoint.add_weights(plain)
    prompts = folder / "calibration.jsonl"
    prompts.write_text(json.dumps({"prompt": "Count from 10 to 30."}) + "\n")
    found = {}
    for name in formats:
        scheme = FORMATS[name].scheme
        found[name] = plain if scheme is None else folder / name
        if scheme is not None:
            quantize(plain, scheme, found[name], prompts if scheme == "nvfp4" else None)
    return found


def shipped(folder: Path, formats: list[str]) -> dict[str, Path]:
    """The same of the model that has learnt something."""
    found = {}
    for name in formats:
        scheme = FORMATS[name].scheme
        if scheme is None:
            found[name] = SHIPPED
        elif scheme in PREPARED:
            found[name] = SHIPPED.with_name(f"{SHIPPED.name}-{PREPARED[scheme]}")
        else:
            found[name] = folder / name
            quantize(SHIPPED, scheme, found[name])
    return found

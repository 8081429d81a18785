"""The shipped FP8 and NVFP4 copies are what `vllm-dllm quantize` makes of the shipped one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.recipes.tasks import Example, calibration_examples
from tests.paths import CHECKPOINTS
from tests.unit.tools.quantize.quantized_files import files
from vllm_dllm.tools.evaluate.report import sha256_sums
from vllm_dllm.tools.quantize.quantize import quantize

pytestmark = pytest.mark.numerics

ROOT = CHECKPOINTS
PLAIN = ROOT / "diffusiongemma-tiny"
FP8, NVFP4 = ROOT / "diffusiongemma-tiny-FP8-dynamic", ROOT / "diffusiongemma-tiny-NVFP4"
NUM_PROMPTS = 3


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_fp8_is_made_again_to_the_byte(tmp_path: Path) -> None:
    quantize(PLAIN, "fp8-dynamic", tmp_path / "out")
    shipped = files(FP8)
    shipped.pop("README.md")
    assert files(tmp_path / "out") == shipped


def test_calibration_prompts_are_those_of_the_script() -> None:
    lines = (ROOT / "calibration.jsonl").read_text().splitlines()
    examples = calibration_examples()
    assert [json.loads(line)["messages"] for line in lines] == [e.messages() for e in examples]
    assert not any(Example("", example.prompt, "").held_out for example in examples)


@pytest.mark.slow  # loads the model and denoises some prompts; all of them take minutes
def test_nvfp4_is_made_again(tmp_path: Path) -> None:
    """All but the scales of inputs to the byte. These have room for the largest input: more prompts
    than here can only make that larger, and the scale, which divides, smaller."""
    prompts = tmp_path / "prompts.jsonl"
    lines = (ROOT / "calibration.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    prompts.write_text("\n".join(lines) + "\n")
    quantize(PLAIN, "nvfp4", tmp_path / "out", prompts)
    made, shipped = files(tmp_path / "out"), files(NVFP4)
    shipped.pop("README.md")
    assert made.keys() == shipped.keys()
    assert [name for name in made if made[name] != shipped[name]] == ["model.safetensors"]
    made_weights = load_file(tmp_path / "out" / "model.safetensors")
    shipped_weights = load_file(NVFP4 / "model.safetensors")
    assert made_weights.keys() == shipped_weights.keys()
    num_scales = 0
    for name, tensor in shipped_weights.items():
        if name.endswith(".input_global_scale"):
            num_scales += 1
            assert 0.1 * made_weights[name] < tensor <= made_weights[name], name
        else:
            assert tensor.dtype == made_weights[name].dtype, name
            assert torch.equal(bits(tensor), bits(made_weights[name])), name
    assert num_scales > 100


@pytest.mark.parametrize(("path", "least"), [(FP8, 0.99), (NVFP4, 0.97)], ids=["fp8", "nvfp4"])
def test_recorded_evaluation(path: Path, least: float) -> None:
    """It is of these files, and they are as good as they must be."""
    results = json.loads((ROOT.parent / "bench/results/cpu-2core/eval.json").read_text())
    for folder in (PLAIN, path):
        assert results["weights"][f"checkpoints/{folder.name}"] == sha256_sums(folder)
    assert results["machine"]["commit"] and not results["machine"]["changed_files"]
    rows = {Path(row["checkpoint"]).name: row for row in results["rows"]}
    plain, own = rows[PLAIN.name], rows[path.name]
    assert own["prompts"] == plain["prompts"] >= 500
    assert own["disk_bytes"] == (path / "model.safetensors").stat().st_size
    assert own["recovery"] >= least
    assert abs(own["steps_per_block"] / plain["steps_per_block"] - 1) <= 0.1
    card = (path / "README.md").read_text()
    for number in (f"{100 * own['accuracy']:.1f} ±", f"{own['recovery']:.1%}"):
        assert number in card

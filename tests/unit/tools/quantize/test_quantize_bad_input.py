"""`vllm-dllm quantize` names what it cannot use, and writes nothing then."""

import json
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.unit.tools.quantize.quantized_files import INDEX, LAYER, files, read
from vllm_dllm import cli
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import TensorInfo
from vllm_dllm.tools.quantize.plan import make_plan
from vllm_dllm.tools.quantize.quantize import quantize
from vllm_dllm.tools.quantize.source import read_source


@pytest.fixture
def damaged(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "damaged"))


UP, EXPERTS = f"{LAYER}mlp.up_proj.weight", f"{LAYER}experts.down_proj"


def in_config(**changes: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changes))

    return damage


def in_weights(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path / json.loads((path / INDEX).read_text())["weight_map"][name]
        weights = load_file(file)
        save_file(weights | {name: change(weights[name])}, file)

    return damage


DAMAGES = {
    "another architecture": (
        in_config(architectures=["Gemma4ForCausalLM"]),
        r"config\.json: expected the architecture DiffusionGemma.*got \['Gemma4ForCausalLM'\]",
    ),
    "quantised already": (
        in_config(quantization_config={"quant_method": "fp8"}),
        r"config\.json has a quantization_config \(fp8\).*start from the unquantised",
    ),
    "no config": (lambda path: (path / "config.json").unlink(), r"damaged .* no config\.json"),
    "no weights": (lambda path: (path / INDEX).unlink(), r"damaged has neither model\.safetensors"),
    "fp8 tensor": (
        in_weights(UP, lambda weight: weight.to(torch.float8_e4m3fn)),
        r"layers\.0\.mlp\.up_proj\.weight has the type F8_E4M3.*start from the unquantised",
    ),
    "NaN": (
        in_weights(EXPERTS, lambda weight: weight.index_fill(2, torch.tensor(3), float("nan"))),
        r"safetensors: model\.decoder\.layers\.0\.experts\.down_proj holds NaN or infinity",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_checkpoint_is_named_and_nothing_written(damaged, tmp_path, damage, message):
    damage(damaged)
    with pytest.raises(InputError, match=message):
        quantize(damaged, "fp8-dynamic", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [damaged]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({UP: None}, r"no tensor model\.decoder\.layers\.0\.mlp\.up_proj\.weight"),
        ({"model.x": TensorInfo((64, 64), "BF16")}, r"model\.x is not a tensor of"),
        (
            {EXPERTS: TensorInfo((256, 32), "BF16")},
            r"layers\.0\.experts\.down_proj: expected 3 axes, got the shape \[256, 32\]",
        ),
    ],
    ids=["missing", "unknown", "of two axes"],
)
def test_tensors_that_the_model_has_not(checkpoint, change, message):
    source = read_source(checkpoint)
    tensors = {n: info for n, info in (source.tensors | change).items() if info is not None}
    with pytest.raises(InputError, match=message):
        make_plan("fp8-dynamic", replace(source, shards={"model.safetensors": tensors}))


def test_width_that_groups_of_16_do_not_divide(tmp_path, prompts):
    path = make_tiny_checkpoint(tmp_path / "odd", moe_intermediate_size=24, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"experts\.down_proj: nvfp4 needs .* got 24; use"):
        quantize(path, "nvfp4", tmp_path / "out", prompts)
    assert list(tmp_path.iterdir()) == [path]
    quantize(path, "fp8-dynamic", tmp_path / "out")  # a single file, without an index
    assert read(tmp_path / "out")[f"{LAYER}experts.3.down_proj.weight"].shape == (64, 24)
    assert not (tmp_path / "out" / INDEX).exists()


def test_options_that_do_not_fit(checkpoint, prompts, tmp_path, capsys):
    def run(*options: object) -> str:
        assert cli.main(["quantize", str(checkpoint), *map(str, options)]) == 1
        return capsys.readouterr().err

    (tmp_path / "there").mkdir()
    assert "there exists already" in run("--scheme", "fp8-dynamic", "-o", tmp_path / "there")
    assert "needs --calibration" in run("--scheme", "nvfp4", "-o", tmp_path / "out")
    options = ["--scheme", "fp8-dynamic", "-o", tmp_path / "out", "--calibration"]
    assert "takes no --calibration" in run(*options, prompts)
    assert "(-o OUT)" in run("--scheme", "fp8-dynamic")
    options = ["--scheme", "nvfp4", "-o", tmp_path / "out", "--calibration"]
    assert "absent.jsonl" in run(*options, tmp_path / "absent.jsonl")
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]


def test_files_that_cannot_be_written(checkpoint, fp8, tmp_path, capsys):
    def run(out: Path) -> str:
        command = ["quantize", str(checkpoint), "--scheme", "fp8-dynamic", "-o", str(out)]
        return capsys.readouterr().err if cli.main(command) else ""

    end = "; once that is fixed, the same command continues from here\n"
    error = run(Path("/proc/nope/out")).splitlines(keepends=True)[-1]
    assert error == (f"vllm-dllm quantize: [Errno 2] No such file or directory: '/proc/nope'{end}")

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # as if the disk were full
    try:
        error = run(tmp_path / "out").splitlines(keepends=True)[-1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.startswith(f"vllm-dllm quantize: {tmp_path / 'out.partial'}/model-00001-of-00003")
    assert "File too large" in error and error.endswith(end)
    assert not run(tmp_path / "out")
    assert files(tmp_path / "out") == files(fp8)

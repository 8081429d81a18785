"""`vllm-dllm quantize` names what it cannot use, and writes nothing then."""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.unit.tools.quantize.quantized_files import INDEX, LAYER, files, read
from vllm_dllm import cli
from vllm_dllm.errors import InputError
from vllm_dllm.tools.quantize.quantize import quantize


@pytest.fixture
def damaged(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "damaged"))


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    for file in path.glob("*.safetensors"):
        weights = load_file(file)
        change(weights)
        save_file(weights, file)


def set_nan(weights: dict[str, torch.Tensor]) -> None:
    if f"{LAYER}experts.down_proj" in weights:
        weights[f"{LAYER}experts.down_proj"][2, 1, 3] = float("nan")


def make_fp8(weights: dict[str, torch.Tensor]) -> None:
    name = f"{LAYER}mlp.up_proj.weight"
    if name in weights:
        weights[name] = weights[name].to(torch.float8_e4m3fn)


def flatten_experts(weights: dict[str, torch.Tensor]) -> None:
    name = f"{LAYER}experts.down_proj"
    if name in weights:
        weights[name] = weights[name].flatten(0, 1)


def rename(weights: dict[str, torch.Tensor]) -> None:
    name = f"{LAYER}mlp.up_proj.weight"
    if name in weights:
        weights[f"{LAYER}mlp.top_proj.weight"] = weights.pop(name)


def edit_json(name: str, **changes) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(content | changes))

    return edit


def without_tensor(path: Path) -> None:
    change_weights(path, lambda weights: weights.pop(f"{LAYER}mlp.up_proj.weight", None))
    index = json.loads((path / INDEX).read_text())
    index["weight_map"].pop(f"{LAYER}mlp.up_proj.weight")
    (path / INDEX).write_text(json.dumps(index))


def rename_in_index_too(path: Path) -> None:
    change_weights(path, rename)
    text = (path / INDEX).read_text()
    (path / INDEX).write_text(
        text.replace(f"{LAYER}mlp.up_proj.weight", f"{LAYER}mlp.top_proj.weight")
    )


def move_shard(file: str) -> Callable[[Path], None]:
    """To `file`, as seen from the folder; the index says so."""

    def move(path: Path) -> None:
        (path / file).parent.mkdir(exist_ok=True)
        (path / "model-00002-of-00003.safetensors").rename(path / file)
        text = (path / INDEX).read_text()
        (path / INDEX).write_text(text.replace("model-00002-of-00003.safetensors", file))

    return move


DAMAGES = {
    "another architecture": (
        edit_json("config.json", architectures=["Gemma4ForCausalLM"]),
        r"config\.json: expected the architecture DiffusionGemma.*got \['Gemma4ForCausalLM'\]",
    ),
    "quantised already": (
        edit_json("config.json", quantization_config={"quant_method": "fp8"}),
        r"config\.json has a quantization_config \(fp8\).*start from the unquantised",
    ),
    "no config": (lambda path: (path / "config.json").unlink(), r"damaged .* no config\.json"),
    "no weights": (lambda path: (path / INDEX).unlink(), r"damaged has neither model\.safetensors"),
    "shard in a folder": (
        move_shard("sub/model.safetensors"),
        r"is said to be in 'sub/model\.safetensors', expected the name of a file in .*damaged: put",
    ),
    "shard elsewhere": (
        move_shard("../damaged/second.safetensors"),
        r"is said to be in '\.\./damaged/second\.safetensors', expected the name of a file",
    ),
    "missing tensor": (
        without_tensor,
        r"no tensor model\.decoder\.layers\.0\.mlp\.up_proj\.weight",
    ),
    "unknown tensor": (rename_in_index_too, r"layers\.0\.mlp\.top_proj\.weight is not a tensor of"),
    "fp8 tensor": (
        lambda path: change_weights(path, make_fp8),
        r"layers\.0\.mlp\.up_proj\.weight has the type F8_E4M3.*start from the unquantised",
    ),
    "experts of two axes": (
        lambda path: change_weights(path, flatten_experts),
        r"layers\.0\.experts\.down_proj: expected 3 axes, got the shape \[256, 32\]",
    ),
    "NaN": (
        lambda path: change_weights(path, set_nan),
        r"safetensors: model\.decoder\.layers\.0\.experts\.down_proj holds NaN or infinity",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_checkpoint_is_named_and_nothing_written(damaged, tmp_path, damage, message):
    damage(damaged)
    with pytest.raises(InputError, match=message):
        quantize(damaged, "fp8-dynamic", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [damaged]


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

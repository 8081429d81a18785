"""What cannot be quantised, weight files that are not whole or not where they are said to be, and
`vllm-dllm quantize` that goes on where it was interrupted."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DiffusionGemmaForBlockDiffusion
from vllm.engine.arg_utils import EngineArgs

from checkpoints.recipes.tiny import make_tiny_checkpoint
from tests.engine.masked import make_checkpoint
from tests.paths import CHECKPOINTS
from tests.unit.config.test_files import room_for
from tests.unit.tools.quantize.quantized_files import INDEX, LAYER, files, read
from vllm_dllm import cli
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import TensorInfo, read_shards, save_tensors
from vllm_dllm.tools.quantize import quantize as quantize_module
from vllm_dllm.tools.quantize.plan import make_plan
from vllm_dllm.tools.quantize.quantize import quantize
from vllm_dllm.tools.quantize.source import Source, read_source


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

    with room_for(50_000):
        error = run(tmp_path / "out").splitlines(keepends=True)[-1]
    assert f"'{tmp_path / 'out.partial'}/model-00001-of-00003" in error
    assert "File too large" in error and error.endswith(end)
    assert not run(tmp_path / "out")
    assert files(tmp_path / "out") == files(fp8)


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


SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three shards of five tensors each, of four bytes."""
    folder, weight_map = tmp_path / "whole", {}
    folder.mkdir()
    for i in range(3):
        file, names = f"model-{i + 1:05}-of-00003.safetensors", [f"{i}.{n}" for n in range(5)]
        save_file({name: torch.zeros(1) for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert [len(tensors) for tensors in read_shards(folder).values()] == [5] * 3
    return folder


def cut(name: str, length: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:length])

    return damage


def move(to: str) -> Callable[[Path], None]:
    """The index says so."""

    def damage(folder: Path) -> None:
        (folder / to).parent.mkdir(exist_ok=True)
        (folder / SECOND).rename(folder / to)
        (folder / INDEX).write_text((folder / INDEX).read_text().replace(SECOND, to))

    return damage


def header(text: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / SECOND).write_bytes(len(text).to_bytes(8, "little") + text)

    return damage


def without_a_tensor(folder: Path) -> None:
    save_file({f"1.{n}": torch.zeros(1) for n in range(4)}, folder / SECOND)


def link_to_nothing(folder: Path) -> None:
    """As in a copy of the hub's cache without its blobs."""
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to("nowhere")


AGAIN = r".*copy or download it again"
FILE_DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no files": (lambda folder: (folder / INDEX).unlink(), r"whole has neither model\.safetensors"),
    "missing": (
        lambda folder: (folder / SECOND).unlink(),
        f"{SECOND} is missing.*5 tensors;{AGAIN}",
    ),
    "header cut short": (cut(SECOND, 100), rf"{SECOND} is not a whole .*\(.*header.*\):{AGAIN}"),
    "a header of no JSON": (header(b"{"), rf"{SECOND} is not a whole .*\(.*\):{AGAIN}"),
    "a header of no places": (
        header(b'{"1.0": {"data_offsets": [0, "4"]}}'),
        rf"{SECOND} is not a whole .*\(.*\):{AGAIN}",
    ),
    "a link to nothing": (
        link_to_nothing,
        rf"{SECOND} is missing: it is a link to nowhere, which is not there;{AGAIN}",
    ),
    "another's": (without_a_tensor, rf"{SECOND} lacks 1\.4.*do not belong together;.*both again"),
    "index cut short": (cut(INDEX, 20), rf"index\.json is not JSON{AGAIN}"),
    "index of nothing": (lambda folder: (folder / INDEX).write_text("{}"), "has no weight_map"),
    "in a folder": (move("sub/x.safetensors"), r"in 'sub/x\.safetensors', expected the name of a"),
    "elsewhere": (move("../whole/x.safetensors"), r"in '\.\./whole/x\.safetensors', expected the"),
}


@pytest.mark.parametrize("name", FILE_DAMAGES)
def test_files_that_are_not_whole(shards: Path, name: str) -> None:
    damage, message = FILE_DAMAGES[name]
    damage(shards)
    with pytest.raises(InputError, match=message) as error:
        read_shards(shards)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lost", [1, 5])
def test_the_first_tensor_that_is_cut_is_named(shards: Path, lost: int) -> None:
    """And how many more are."""
    whole = (shards / SECOND).read_bytes()
    cut(SECOND, size := len(whole) - 4 * lost + 1)(shards)
    rest = r"; 1\.\d would end at byte {}{}\)".format(
        len(whole) - 4 * (lost - 1), ", and so would 4 more tensors" if lost == 5 else ""
    )
    with pytest.raises(InputError, match=rf"it ends at byte {size}{rest}"):
        read_shards(shards)


def test_a_server_looks_before_it_starts(fp8: Path, tmp_path: Path) -> None:
    """Unless it makes the weights up, or takes them from other files or none."""
    path = Path(shutil.copytree(fp8, tmp_path / "damaged"))

    def create_config(**options: str) -> None:
        """What `vllm serve` does first."""
        arguments = EngineArgs(str(path), enforce_eager=True, max_model_len=1024, **options)
        arguments.create_engine_config()

    create_config()
    cut(SECOND, -1)(path)
    with pytest.raises(ValueError, match=re.escape(SECOND)):
        create_config()
    for other in ("dummy", "sharded_state", "tensorizer", "ipc_cache", "pt"):
        create_config(load_format=other)
    (path / INDEX).unlink()
    (path / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(ValueError, match="it is a link to nowhere"):
        create_config()


class Interruption(Exception):
    pass


def interrupt_after(calls: int, function: Callable) -> Callable:
    """`function`, which the call after `calls` ends."""
    made = 0

    def wrapped(*args, **kwargs):
        nonlocal made
        made += 1
        if made > calls:
            raise Interruption
        return function(*args, **kwargs)

    return wrapped


def never(*args, **kwargs):
    raise AssertionError("this was done before the interruption")


def test_goes_on_at_the_prompt_it_was_interrupted_at(
    checkpoint, prompts, fp4, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    generate = DiffusionGemmaForBlockDiffusion.generate
    with monkeypatch.context() as patch:
        patch.setattr(DiffusionGemmaForBlockDiffusion, "generate", interrupt_after(2, generate))
        with pytest.raises(Interruption):
            quantize(checkpoint, "nvfp4", out, prompts)
    results = json.loads((tmp_path / "out.partial" / "input_ranges.json").read_text())
    assert results["done"] == 2 and not out.exists()
    with monkeypatch.context() as patch:  # one prompt is left
        patch.setattr(DiffusionGemmaForBlockDiffusion, "generate", interrupt_after(1, generate))
        quantize(checkpoint, "nvfp4", out, prompts)
    assert files(out) == files(fp4)


WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.copyfile"}


class InterruptedWrites:
    """Ends a program at the next file operation in `folder` after `left` ones; Python tells its
    audit hooks of each before it happens."""

    def __init__(self) -> None:
        self.folder, self.left = "", sys.maxsize
        sys.addaudithook(self._hook)  # for good: hooks cannot be removed

    def arm(self, folder: Path, left: int) -> None:
        self.folder, self.left = str(folder), left

    def disarm(self) -> None:
        self.left = sys.maxsize

    def _hook(self, event: str, args: tuple) -> None:
        if self.left == sys.maxsize:
            return
        writes = event in WRITES or (event == "open" and "w" in str(args[1]))
        if writes and any(str(arg).startswith(self.folder) for arg in args):
            self.left -= 1
            if self.left < 0:
                raise Interruption


@pytest.mark.slow
def test_goes_on_from_every_file_operation(checkpoint, prompts, fp4, tmp_path, monkeypatch):
    """Those from the first shard on are each the last one of some run; nothing is computed twice
    by the run that follows."""
    out, partial, before = (tmp_path / name for name in ("out", "out.partial", "before"))
    with monkeypatch.context() as patch:
        patch.setattr(quantize_module, "save_tensors", interrupt_after(2, save_tensors))
        with pytest.raises(Interruption):
            quantize(checkpoint, "nvfp4", out, prompts)
    partial.rename(before)
    monkeypatch.setattr(quantize_module, "_find_weight_amax", never)
    monkeypatch.setattr(DiffusionGemmaForBlockDiffusion, "from_pretrained", never)
    states, interrupted = [], InterruptedWrites()
    for count in range(100):
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(before, partial)
        interrupted.arm(tmp_path, count)
        try:
            quantize(checkpoint, "nvfp4", out, prompts)
            break
        except Interruption:
            states.append(out.exists())
        finally:
            interrupted.disarm()
        quantize(checkpoint, "nvfp4", out, prompts)
        assert files(out) == files(fp4) and not partial.exists(), f"after {count} operations"
    assert states.count(False) > 10  # files, index, config.json, and their renaming
    assert states.count(True) == 3  # two files of ranges, and what says which run it was
    with pytest.raises(InputError, match="out exists already"):
        quantize(checkpoint, "nvfp4", out, prompts)

"""Weight files that are not whole, or not where they are said to be, are named: before a server of
the checkpoint starts, and before it is quantised."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm.engine.arg_utils import EngineArgs

from tests.unit.tools.quantize.quantized_files import INDEX
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import read_shards

SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture
def files(tmp_path: Path) -> Path:
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


AGAIN = r".*copy or download it again"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
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
    "another's": (without_a_tensor, rf"{SECOND} lacks 1\.4.*do not belong together;.*both again"),
    "index cut short": (cut(INDEX, 20), rf"index\.json is not JSON{AGAIN}"),
    "index of nothing": (lambda folder: (folder / INDEX).write_text("{}"), "has no weight_map"),
    "in a folder": (move("sub/x.safetensors"), r"in 'sub/x\.safetensors', expected the name of a"),
    "elsewhere": (move("../whole/x.safetensors"), r"in '\.\./whole/x\.safetensors', expected the"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_files_that_are_not_whole(files: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(files)
    with pytest.raises(InputError, match=message) as error:
        read_shards(files)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lost", [1, 5])
def test_the_first_tensor_that_is_cut_is_named(files: Path, lost: int) -> None:
    """And how many more are."""
    whole = (files / SECOND).read_bytes()
    cut(SECOND, size := len(whole) - 4 * lost + 1)(files)
    rest = r"; 1\.\d would end at byte {}{}\)".format(
        len(whole) - 4 * (lost - 1), ", and so would 4 more tensors" if lost == 5 else ""
    )
    with pytest.raises(InputError, match=rf"it ends at byte {size}{rest}"):
        read_shards(files)


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

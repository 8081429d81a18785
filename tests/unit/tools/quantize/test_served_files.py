"""A server of a quantised checkpoint whose files are not whole names them and does not start."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs

from tests.unit.tools.quantize.quantized_files import INDEX

SECOND = "model-00002-of-00003.safetensors"


def create_config(path: Path, **options: str) -> None:
    """What `vllm serve` does first."""
    EngineArgs(str(path), enforce_eager=True, max_model_len=1024, **options).create_engine_config()


def cut_short(path: Path) -> None:
    (path / SECOND).write_bytes((path / SECOND).read_bytes()[:-1])


def cut_in_the_header(path: Path) -> None:
    (path / SECOND).write_bytes((path / SECOND).read_bytes()[:100])


def without_a_tensor(path: Path) -> None:
    weights = load_file(path / SECOND)
    del weights[min(weights)]
    save_file(weights, path / SECOND)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing-shard": (
        lambda path: (path / SECOND).unlink(),
        rf"{SECOND} is missing: .* holds \d+ tensors; copy or download it again",
    ),
    "truncated-shard": (
        cut_short,
        rf"{SECOND} is not a whole safetensors file \(it ends at byte \d+; "
        r"model\.decoder\.[\w.]+ would end at byte \d+\): copy or download it again",
    ),
    "header-cut-short": (
        cut_in_the_header,
        rf"{SECOND} is not a whole safetensors file \(.*header.*\): copy or download it again",
    ),
    "shard-of-another": (
        without_a_tensor,
        rf"{SECOND} lacks model\.decoder\..*do not belong together; copy or download both again",
    ),
    "index-cut-short": (
        lambda path: (path / INDEX).write_text((path / INDEX).read_text()[:200]),
        r"index\.json is not JSON .*copy or download it again",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_files_that_are_not_whole(fp8: Path, tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    path = Path(shutil.copytree(fp8, tmp_path / "damaged"))
    create_config(path)
    damage(path)
    with pytest.raises(ValueError, match=message):
        create_config(path)


def test_the_first_tensor_that_is_cut_is_named(fp8: Path, tmp_path: Path) -> None:
    """The fifth from the end, in the order in which they lie in the file, has one byte left."""
    file = Path(shutil.copytree(fp8, tmp_path / "damaged")) / SECOND
    content = file.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:data])
    del header["__metadata__"]
    places = {name: tensor["data_offsets"] for name, tensor in header.items()}
    first = sorted(places, key=places.__getitem__)[-5]
    begin, end = places[first]
    file.write_bytes(content[: data + begin + 1])
    message = (
        rf"it ends at byte {data + begin + 1}; {re.escape(first)} would end at byte {data + end}, "
        r"and so would 4 more tensors\): copy"
    )
    with pytest.raises(ValueError, match=message):
        create_config(file.parent)


def test_random_weights_need_no_files(fp8: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(fp8, tmp_path / "damaged"))
    cut_short(path)
    create_config(path, load_format="dummy")


def test_the_shards_are_three(fp8: Path) -> None:
    """The damages above mean something."""
    files = set(json.loads((fp8 / INDEX).read_text())["weight_map"].values())
    assert len(files) == 3 and SECOND in files

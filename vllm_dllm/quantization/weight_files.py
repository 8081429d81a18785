"""A checkpoint's weight files, read without the weights, and written."""

import errno
import json
import math
import os
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_dllm.errors import InputError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100_000_000  # as safetensors reads them
UNQUANTISED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1}
"""Bytes of a number, by safetensors' name of the type, for types that are not quantised."""
DTYPE_BYTES = UNQUANTISED_BYTES | {"F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "I8": 1}


@dataclass(frozen=True)
class TensorInfo:
    """Shape and type of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: str
    """safetensors' name of the type: BF16, F32, ..."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@contextmanager
def open_shard(path: Path) -> Iterator[Any]:
    """Yields safetensors' reader of one file, which makes PyTorch tensors. Raises InputError, also
    for errors of reading in the context, that names the file and, if it was cut short, the first
    tensor it lacks."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise InputError(
            f"{path} is not a whole safetensors file ({_describe_truncation(path) or error}): copy "
            f"or download it again"
        ) from error


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file, which those may read who may read its folder, and replaces `path`
    in one step. Raises OSError if writing fails."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        save_file(dict(tensors), unfinished, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(unfinished)) from error
    unfinished.chmod(path.parent.stat().st_mode & 0o666)  # save_file lets only the owner read
    unfinished.replace(path)


def load_state(module: nn.Module, folder: Path) -> None:
    """Loads the one weight file in `folder` into `module`. Raises InputError if the file is damaged
    or has other weights, FileNotFoundError if there is none."""
    with open_shard(folder / WEIGHTS_FILE) as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the weights in {folder} do not fit its config.json: {reason}") from error


def _describe_truncation(path: Path) -> str | None:
    """Returns text that says where a file was cut short, according to its header. None if the
    header itself is incomplete or nothing is missing.

    https://huggingface.co/docs/safetensors, "Format": 8 bytes for the header's length, the header,
    and the tensors at `data_offsets` from its end.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        data = 8 + int.from_bytes(file.read(8), "little")
        if data > min(size, MOST_HEADER_BYTES):
            return None
        try:
            header = json.loads(file.read(data - 8))
            tensors = {n: t for n, t in header.items() if n != "__metadata__"}
            ends = {name: data + t["data_offsets"][1] for name, t in tensors.items()}
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
    lost = {name: end for name, end in ends.items() if end > size}
    if not lost:
        return None
    first = min(lost, key=lost.__getitem__)
    rest = f", and so would {len(lost) - 1} more tensors" if len(lost) > 1 else ""
    return f"it ends at byte {size}; {first} would end at byte {lost[first]}{rest}"


def read_shards(path: Path) -> dict[str, dict[str, TensorInfo]]:
    """Returns shape and type of each tensor in the checkpoint's folder `path`, by file and name.
    Reads the headers only, so a checkpoint may have any types.

    Raises:
        InputError: a file is missing, cut short or from another checkpoint; names it.
    """
    wanted: dict[str, set[str]] = {}
    if (path / INDEX_FILE).exists():
        index = read_json(path / INDEX_FILE)
        if "weight_map" not in index:
            raise InputError(f"{path / INDEX_FILE} has no weight_map: copy or download it again")
        for name, file in index["weight_map"].items():
            # vLLM does not find files in subfolders, and "../" would lead out of OUT.
            if Path(file).name != file:
                raise InputError(
                    f"{path / INDEX_FILE}: {name} is said to be in '{file}', expected the name of "
                    f"a file in {path}: put all weight files there and correct the index"
                )
            wanted.setdefault(file, set()).add(name)
    elif os.path.lexists(path / WEIGHTS_FILE):
        wanted = {WEIGHTS_FILE: set()}
    else:
        raise InputError(
            f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}: expected weights in the "
            f"safetensors format, as transformers' save_pretrained writes them"
        )
    return {file: _read_header(path / file, wanted[file]) for file in sorted(wanted)}


def _read_header(path: Path, wanted: set[str]) -> dict[str, TensorInfo]:
    """Returns shape and type of each tensor in a file, by name. Raises InputError if the file or
    one of the tensors `wanted` is missing."""
    if not path.exists():
        reason = f"{INDEX_FILE} says that it holds {len(wanted)} tensors"
        if path.is_symlink():
            reason = f"it is a link to {path.readlink()}, which is not there"
        raise InputError(f"{path} is missing: {reason}; copy or download it again")
    with open_shard(path) as file:
        tensors = {}
        for name in file.keys():  # noqa: SIM118 (not a dict)
            view = file.get_slice(name)
            tensors[name] = TensorInfo(tuple(view.get_shape()), view.get_dtype())
    if absent := wanted - tensors.keys():
        raise InputError(
            f"{path} lacks {min(absent)}, which {INDEX_FILE} says it holds: the files do not "
            f"belong together; copy or download both again"
        )
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, {} if there is no file. Raises InputError, naming the
    file, if it holds none."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}): copy or download it again") from error
    if not isinstance(found, dict):
        raise InputError(
            f"{path} must be a JSON object, got {reprlib.repr(found)}: copy or download it again"
        )
    return found

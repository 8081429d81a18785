"""Stores what a server measured, for the next start on the same machine."""

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform

import attention_kernels
import vllm_dllm
from vllm_dllm.compat.gpu import driver_version

RESULT = "measured.json"
KERNELS = (
    Path(attention_kernels.__path__[0]),
    *(Path(vllm_dllm.__path__[0], name) for name in ("attention", "config/tuned", "experts")),
    Path(__file__).parent,
)
"""Folders with the sources of what is timed, and with the tables of what is tried."""
_CHANGED = ("attention_k_eq_v", "max_position_embeddings")
"""What building DiffusionGemma changes in its configuration. The folder is asked for before and
after."""


def result_folder(vllm_config: VllmConfig) -> Path:
    """Returns the folder for this GPU, driver, versions, model and server. All processes of a
    server get the same one. It may not exist yet."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    assert vllm_config.diffusion_config is not None
    text_config = model.hf_text_config.to_dict()
    for name in _CHANGED:
        text_config.pop(name, None)
    parts = {
        "gpu": current_platform.get_device_name(),
        "driver": driver_version(),
        "versions": [vllm.__version__, torch.__version__, triton.__version__],
        "kernels": hash_files(KERNELS),  # installed from git, they change and the version does not
        "model": text_config,
        "types": [str(model.dtype), model.quantization, cache.cache_dtype],
        "canvas": vllm_config.diffusion_config.canvas_length,
        # That of `--max-model-len auto` is found after the folder is first asked for.
        "longest": -1 if model.original_max_model_len == -1 else model.max_model_len,
        "rows": vllm_config.scheduler_config.max_num_batched_tokens,
        "ranks": vllm_config.parallel_config.tensor_parallel_size,
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    name = f"{parts['gpu']}-{key[:16]}".replace(" ", "_")
    return Path(envs.VLLM_CACHE_ROOT) / "vllm_dllm" / "kernels" / name


@functools.cache
def hash_files(folders: Sequence[Path]) -> str:
    """Returns a digest, in hexadecimal, of the Python and JSON files in and below `folders`."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.json"))):
            digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def read_result(path: Path) -> dict[str, Any] | None:
    """Returns what was written as `RESULT` in the folder `path`. Returns None if nothing was, or it
    cannot be read."""
    try:
        found = json.loads((path / RESULT).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, name: str, value: Any) -> None:
    """Writes `value` as JSON to the file `name` in the folder `path`, which it makes if needed. The
    file is written whole or not at all, even if others write it, too. Raises OSError if it cannot
    be written."""
    path.mkdir(parents=True, exist_ok=True)
    partial = path / f".{name}.{os.getpid()}"
    partial.write_text(json.dumps(value, indent=1))
    partial.replace(path / name)

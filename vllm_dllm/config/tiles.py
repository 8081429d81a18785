"""How experts run steps of canvases on GPUs where that was measured, beside vLLM's own choice.

A step of canvases gives each expert more rows than decoding does and fewer than a prompt. By names
of the files in which vLLM looks for tile sizes of its Triton kernel, `block_sizes.json` says at how
many rows of a step our own kernel is faster, and in blocks of how many rows; 0 means vLLM's kernel.
For layers that ours cannot run, `tuned` also has tile sizes that vLLM ships for no such experts.
vLLM looks for them in `VLLM_TUNED_CONFIG_FOLDER` before its own folder.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)

FOLDER = Path(__file__).parent / "tuned"
VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"
BLOCK_SIZES = "block_sizes.json"


def set_tuned_config_folder(folder: Path = FOLDER) -> None:
    """Makes this process and its children read tile sizes from `folder`, by `VARIABLE` in the
    environment. Does nothing if that is set already, or without an NVIDIA GPU. Repeatable.

    A folder of this server's gets the files that we ship and it lacks. If it cannot be written,
    `FOLDER` is read.
    """
    if not current_platform.is_cuda() or VARIABLE in os.environ:
        return
    try:
        for file in FOLDER.glob("E=*.json") if folder != FOLDER else ():
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / file.name).exists():
                partial = folder / f".{file.name}.{os.getpid()}"
                shutil.copy(file, partial)
                partial.replace(folder / file.name)
    except OSError as error:
        logger.warning(
            "Cannot keep tile sizes in %s: %s. Those that we ship are read.", folder, error
        )
        folder = FOLDER
    os.environ[VARIABLE] = str(folder)


def may_replace_experts(vllm_config: VllmConfig, folder: Path = FOLDER) -> bool:
    """Whether experts may run other kernels and tile sizes than vLLM's: not if the user named
    either, nor under `VLLM_BATCH_INVARIANT`, where a row may not depend on how many there are.
    `folder`: where this server's tile sizes are."""
    is_ours = os.environ.get(VARIABLE, str(FOLDER)) in (str(FOLDER), str(folder))
    backend = vllm_config.kernel_config.moe_backend
    return is_ours and backend in ("auto", "triton") and not envs.VLLM_BATCH_INVARIANT


def shipped_tiles(file: str) -> dict[str, Any]:
    """Returns the tile sizes in the file of this name that we ship, none if we ship none."""
    path = FOLDER / file
    return dict(json.loads(path.read_text())) if path.exists() else {}


def all_shipped_tiles() -> list[dict[str, int]]:
    """Returns the tiles of all files that we ship, each once."""
    shipped: list[dict[str, int]] = []
    for path in sorted(FOLDER.glob("E=*.json")):
        for tile in json.loads(path.read_text()).values():
            if isinstance(tile, dict) and tile not in shipped:
                shipped.append(tile)
    return shipped


def shipped_block_sizes() -> dict[str, dict[str, int]]:
    """Returns what `block_sizes.json` says, by names of files of tile sizes."""
    found: dict[str, dict[str, int]] = json.loads((FOLDER / BLOCK_SIZES).read_text())
    return found

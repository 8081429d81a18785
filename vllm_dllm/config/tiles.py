"""Tile sizes of vLLM's Triton experts for steps of canvases, where vLLM has none of its own.

Files are named and written as vLLM's, which looks for them in `VLLM_TUNED_CONFIG_FOLDER` before its
own folder. A step of canvases gives each expert more rows than decoding does and fewer than a
prompt, and vLLM ships nothing for the 26B model's experts.
"""

import os
from pathlib import Path

from vllm.platforms import current_platform

FOLDER = Path(__file__).parent / "tuned"
VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"


def set_tuned_config_folder(folder: Path = FOLDER) -> None:
    """Makes this process and its children read tile sizes from `folder`, by `VARIABLE` in the
    environment. Does nothing if that is set already, or without an NVIDIA GPU. Repeatable."""
    if current_platform.is_cuda():
        os.environ.setdefault(VARIABLE, str(folder))

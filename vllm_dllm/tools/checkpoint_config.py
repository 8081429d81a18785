"""Reads config.json and the tokenizer of a checkpoint that a user names."""

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from vllm_dllm.config.architectures import register_configs
from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import read_json


def read_config(folder: Path) -> PretrainedConfig:
    """Returns config.json as transformers reads it. Raises InputError if that is not possible."""
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"{file} does not exist: expected the folder of a checkpoint")
    read_json(file)  # says what is wrong with the file, if it is no JSON
    register_configs()
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{file} is not what transformers expects ({reason})") from error


def read_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer in the folder. Raises InputError if it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"transformers cannot read the tokenizer in {folder} ({reason})"
        ) from error

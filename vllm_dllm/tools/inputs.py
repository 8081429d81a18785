"""Reads what a user names: a checkpoint's config.json and tokenizer, and prompts in a JSON Lines
file.

A prompt's row is {"messages": [...]}, which goes through the chat template, or {"prompt": "text"}.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
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


Row = tuple[str, dict[str, Any]]
"""The place of the row in its file, for error messages, and the row's content."""


def read_prompt_rows(path: Path) -> list[Row]:
    """Returns the rows of all lines that are not empty. Raises InputError if the file cannot be
    read, a line is not a prompt, or there are no rows. The message has the line's number."""
    try:
        lines = path.read_bytes().split(b"\n")  # JSON may hold other signs that end a line
    except OSError as error:
        raise InputError(f"cannot read the prompts: {path}: {error}") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{place} is not JSON: {error}") from error
        if not isinstance(row, dict) or not (row.get("messages") or row.get("prompt")):
            raise InputError(f'{place}: expected {{"messages": [...]}} or {{"prompt": "text"}}')
        rows.append((place, row))
    if not rows:
        raise InputError(f"{path} holds no prompts: expected one JSON object per line")
    return rows


def encode_prompt_rows(
    rows: Sequence[Row], model: Path, max_tokens: int, remedy: str
) -> list[list[int]]:
    """Returns the token ids of each row, by the tokenizer in the folder `model`.

    Raises:
        InputError: a row cannot be encoded, or has no tokens or more than `max_tokens`. For the
            latter the message ends with `remedy`, which says why, and what to do.
    """
    tokenizer = read_tokenizer(model)
    prompts = []
    for place, row in rows:
        try:
            text, messages = row.get("prompt"), row.get("messages")
            if messages:
                text = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            elif not isinstance(text, str):
                raise TypeError("the prompt is not a string")
            tokens = tokenizer.encode(text, add_special_tokens=not messages)
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(f"{place} cannot be encoded: {error}") from error
        if not 0 < len(tokens) <= max_tokens:
            raise InputError(
                f"{place} has {len(tokens)} tokens, expected 1 to {max_tokens}: {remedy}"
            )
        prompts.append(tokens)
    return prompts

"""Ends a start with one line for a value that an option of `vllm serve` does not take.

vLLM's own line shows a function's address or ends with the address of a page, or it comes after the
engine has started and does not name the option.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_dllm.startup.last_line import one_line

EXAMPLES = {
    "--additional-config": '{"vllm_dllm": {"commit_last_block": true}}',
    "--diffusion-config": '{"canvas_length": 64}',
    "--speculative-config": '{"method": "dflash", "model": "FOLDER", "num_speculative_tokens": 15}',
    "--override-generation-config": '{"t_min": 0.4}',
    "--hf-overrides": '{"block_size": 32}',
}
"""Options that take a JSON object and that diffusion models are served with -> examples."""

_INTEGER = "an integer > 0, or one with k, m, g or t (powers of 1000) or K, M, G or T (of 1024)"
_FILE = (lambda path: os.access(path, os.R_OK), "a file that can be read")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    option: (lambda value: isinstance(value, dict), f"a JSON object such as '{example}'")
    for option, example in EXAMPLES.items()
} | {
    "--kv-cache-memory-bytes": (lambda value: value is None or value > 0, _INTEGER),
    "--uds": (lambda path: Path(path).parent.is_dir(), "a path in a folder that is there"),
    **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"), _FILE),
}
"""Option -> what must be true of its value, and the text that completes "must be"."""

_stock_get_value = argparse.ArgumentParser._get_value


def install() -> None:
    """Has all command lines that this process reads checked. Repeatable."""
    argparse.ArgumentParser._get_value = _get_value  # type: ignore[method-assign, assignment]


def _get_value(parser: argparse.ArgumentParser, action: argparse.Action, text: str) -> Any:
    """Returns what `text` on the command line is for the option of `action`. Raises SystemExit with
    one line if it is none of its values."""
    option = max(action.option_strings, key=len, default="")
    is_right, expected = _RULES.get(option, (lambda value: True, "valid JSON in quotes"))
    reason = ""
    try:
        value = _stock_get_value(parser, action, text)
        if is_right(value):
            return value
    except argparse.ArgumentError as error:
        cause = error.__context__ and error.__context__.__cause__
        if isinstance(cause, (json.JSONDecodeError, ValidationError)):
            reason = f": {one_line(cause)}"
        elif "human_readable_int" in str(error):
            expected = _INTEGER
        else:
            raise
    raise SystemExit(f"Error: {option} must be {expected}, got {text!r}{reason}.")

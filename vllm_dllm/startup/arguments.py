"""What `vllm serve` is told, looked at before vLLM parses it."""

import json
import multiprocessing
from collections.abc import Sequence


def check(arguments: Sequence[str]) -> None:
    """Ends the process where `--additional-config` is not JSON: vLLM's own error names a function.
    `arguments`: of the command line. Others are not looked at."""
    if arguments[1:2] != ["serve"] or multiprocessing.parent_process() is not None:
        return
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, is_joined, value = word.partition("=")
        if name.replace("_", "-") == "--additional-config":
            _check_json(value if is_joined else following)


def _check_json(text: str) -> None:
    try:
        json.loads(text)
    except ValueError as error:
        raise SystemExit(
            f"Error: --additional-config must be JSON, got {text!r}: {error}. Quote it for "
            """the shell, as in --additional-config '{"vllm_dllm": {"commit_last_block": true}}'."""
        ) from None

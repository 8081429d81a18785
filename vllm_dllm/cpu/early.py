"""`vllm serve` of a model of ours starts its fork server before it imports vLLM itself."""

import json
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_dllm.config.architectures import DIFFUSION_GEMMA, FAMILIES
from vllm_dllm.config.workers import CPU_IMPORTS, cpu_variables
from vllm_dllm.cpu import fork_server
from vllm_dllm.cpu.compat import engine_processes


def start_fork_server(arguments: Sequence[str]) -> None:
    """`arguments`: of the command line. Others start it when they start an engine."""
    if multiprocessing.parent_process() is None and serves_our_model(arguments):
        fork_server.start(
            (*engine_processes.MODULES, *CPU_IMPORTS),
            engine_processes.variables() | cpu_variables(os.environ),
        )


def serves_our_model(arguments: Sequence[str]) -> bool:
    return arguments[1:2] == ["serve"] and any(map(_is_ours, arguments[2:]))


def _is_ours(folder: str) -> bool:
    try:
        config: Any = json.loads((Path(folder) / "config.json").read_bytes())
        return not {DIFFUSION_GEMMA, *FAMILIES}.isdisjoint(config["architectures"])
    except (OSError, ValueError, TypeError, KeyError):
        return False  # not a checkpoint; what is wrong with it, the start will say

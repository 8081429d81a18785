"""The engine and the worker of a server come from its fork server."""

import os
from pathlib import Path

import psutil
import pytest

from tests.processes import output_of
from tests.server.conftest import CHECKPOINT, Server
from vllm_dllm.cpu.fork_server import serves_our_model

REFUSED = "import everything again"

PROGRAM = """
import json, os, sys
from vllm_dllm.cpu.compat import engine_processes
from vllm_dllm.config.workers import cpu_variables
from vllm_dllm.cpu import fork_server

early = os.environ | engine_processes.engine_variables() | cpu_variables(os.environ)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.plugins import load_general_plugins

load_general_plugins()
AsyncEngineArgs(model=sys.argv[1]).create_engine_config()
print("RESULT", json.dumps(sorted(fork_server.changed_variables(early, os.environ))))
"""


def test_engine_and_worker_come_from_one_process(server: Server) -> None:
    (leader,) = {c.pid for c in psutil.net_connections() if c.laddr[1:] == (server.port,) and c.pid}
    titles = {
        p.cmdline()[0].partition("_")[0]: p.ppid()
        for p in psutil.Process(leader).children(recursive=True)
        if p.cmdline()[0].startswith("VLLM::")
    }
    assert titles["VLLM::EngineCore"] == titles["VLLM::Worker"]
    assert psutil.Process(titles["VLLM::Worker"]).ppid() == leader
    assert REFUSED not in server.log.read_text()


@pytest.mark.parametrize("compiler", [{}, {"CXX": "/nowhere"}], ids=["a compiler", "none"])
def test_the_environment_is_foreseen(compiler: dict[str, str]) -> None:
    """What vLLM and we set before an engine starts, and libraries read when they are loaded."""
    given = ("OMP_", "GOMP_", "KMP_", "VLLM_RING")  # or they would not be ours
    environment = {k: v for k, v in os.environ.items() if not k.startswith(given)}
    assert (
        "RESULT []" in output_of("-c", PROGRAM, CHECKPOINT, env=environment | compiler).splitlines()
    )


@pytest.mark.parametrize(
    ("config", "is_ours"),
    [
        ('{"architectures": ["DiffusionGemmaForBlockDiffusion"]}', True),
        ('{"architectures": ["SDARForCausalLM"]}', True),
        ('{"architectures": ["Qwen3ForCausalLM"]}', False),
        ('{"architectures": null}', False),
        ("[1, 2]", False),
        ("no JSON", False),
        (None, False),
    ],
)
def test_it_starts_early_for_our_models_alone(
    tmp_path: Path, config: str | None, is_ours: bool
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert serves_our_model(["vllm", "serve", "--port", "1", str(tmp_path)]) == is_ours
    assert not serves_our_model(["vllm", "bench", str(tmp_path)])
    assert not serves_our_model([str(tmp_path)])

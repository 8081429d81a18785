"""The plugin as vLLM meets it: by its entry point, in every process, more than once. No process
outlives the one that started it."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm import ModelRegistry

from tests.paths import CHECKPOINTS
from tests.processes import is_running, output_of, run, wait_for
from vllm_dllm import plugin
from vllm_dllm.startup import installation

IN_A_FRESH_PROCESS = """
import logging
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from vllm.model_executor.models.registry import ModelRegistry
from vllm.plugins import load_general_plugins

load_general_plugins()
configure_logging(LoggingConfig())  # as each of vLLM's processes does, once it has its settings
model = ModelRegistry.models["DiffusionGemmaForBlockDiffusion"]
print("registered", model.module_name)
logging.getLogger("vllm_dllm").info("hello from the extension")
"""


@pytest.fixture
def register_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Registers with a vLLM of this version, and leaves the process as `register` makes it."""

    def register(version: str) -> None:
        monkeypatch.setattr(vllm, "__version__", version)
        plugin.register()

    yield register
    monkeypatch.undo()
    plugin.register()


@pytest.mark.parametrize("name", ["vllm_dllm", "vllm_dllm_canvas"])
def test_one_name_loads_all(name: str) -> None:
    """vLLM loads no plugins that VLLM_PLUGINS does not name, and a CPU's vLLM needs both."""
    (entry_point,) = entry_points(group="vllm.general_plugins", name=name)
    assert entry_point.load() is plugin.register
    (entry_point,) = entry_points(group="vllm.platform_plugins", name=name)
    assert entry_point.load() is installation.check


@pytest.mark.slow
def test_vllm_loads_it_and_shows_its_log() -> None:
    """vLLM swallows errors of plugins and would go on without us."""
    env = {**os.environ, "VLLM_PLUGINS": "vllm_dllm_canvas", "VLLM_LOGGING_LEVEL": "INFO"}
    done = run(sys.executable, "-c", IN_A_FRESH_PROCESS, env=env)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "registered vllm_dllm.models.diffusion_gemma" in done.stdout, output
    assert "Failed to load plugin" not in output
    (line,) = [line for line in output.splitlines() if "hello from the extension" in line]
    assert "INFO" in line  # vLLM's format


LOGS_OF_A_USER = """
import sys
from vllm.engine.arg_utils import EngineArgs

EngineArgs(sys.argv[1], enforce_eager=True, max_model_len=512).create_engine_config()
"""


@pytest.mark.slow
def test_a_logging_configuration_of_the_users(tmp_path: Path) -> None:
    """Without `disable_existing_loggers`, as in vLLM's examples: ours are not among vLLM's."""
    file = tmp_path / "logging.json"
    handlers = {"h": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}}
    loggers = {"vllm": {"handlers": ["h"], "level": "INFO", "propagate": False}}
    file.write_text(json.dumps({"version": 1, "handlers": handlers, "loggers": loggers}))
    env = os.environ | {"VLLM_LOGGING_CONFIG_PATH": str(file)}
    said = output_of(sys.executable, "-c", LOGS_OF_A_USER, CHECKPOINTS / "sdar-tiny", env=env)
    assert "requests at once." in said, said


def test_register_is_repeatable() -> None:
    plugin.register()
    plugin.register()
    model = ModelRegistry.models["DiffusionGemmaForBlockDiffusion"]
    assert model.module_name == "vllm_dllm.models.diffusion_gemma"
    assert logging.getLogger("vllm_dllm").parent is logging.getLogger("vllm")


@pytest.fixture
def complaints(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"error": [], "warning": []}
    for level, lines in found.items():
        monkeypatch.setattr(plugin.logger, level, lines.append)
    return found


def served_model() -> Any:
    return ModelRegistry.models["DiffusionGemmaForBlockDiffusion"]


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        ("0.31.2", "install vLLM 0.32 or 0.33, or an older vllm-dllm."),
        ("0.34.0+cpu", "or set VLLM_DLLM_UNKNOWN_VLLM=1 to go on at your own risk."),
        ("1.2.0", "or set VLLM_DLLM_UNKNOWN_VLLM=1 to go on at your own risk."),
        ("dev", "or set VLLM_DLLM_UNKNOWN_VLLM=1 to go on at your own risk."),
    ],
)
def test_another_vllm_is_told_the_known_versions(
    version: str,
    remedy: str,
    register_with: Callable[[str], None],
    complaints: dict[str, list[str]],
) -> None:
    register_with(version)
    (complaint,) = complaints["error"]
    assert f"knows vLLM 0.32 and 0.33, found {version}. Diffusion models cannot" in complaint
    assert complaint.endswith(remedy)
    # Asking for one of our models says so again, instead of serving vLLM's own version of it.
    with pytest.raises(RuntimeError, match=r"knows vLLM 0\.32 and 0\.33"):
        served_model().load_model_cls()


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.32.7", "0.33.0", "0.33.0rc1"])
def test_known_versions_are_served_without_a_word(
    version: str, register_with: Callable[[str], None], complaints: dict[str, list[str]]
) -> None:
    register_with(version)
    assert complaints == {"error": [], "warning": []}
    assert served_model().module_name == "vllm_dllm.models.diffusion_gemma"


@pytest.mark.parametrize(("version", "can_serve"), [("0.34.0", True), ("0.31.2", False)])
def test_a_newer_vllm_is_tried_at_the_users_own_risk(
    version: str,
    can_serve: bool,
    register_with: Callable[[str], None],
    complaints: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_DLLM_UNKNOWN_VLLM", "1")
    register_with(version)
    assert (len(complaints["warning"]), len(complaints["error"])) == (can_serve, not can_serve)
    ours = "vllm_dllm.models.diffusion_gemma"
    assert (served_model().module_name == ours) is can_serve


def test_what_does_not_load_is_not_replaced_by_vllms_own(
    register_with: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM logs the error and goes on."""
    monkeypatch.setitem(sys.modules, "vllm_dllm.serving_config", None)
    with pytest.raises(ImportError):
        plugin.register()
    with pytest.raises(RuntimeError, match="did not load with vLLM"):
        served_model().load_model_cls()


PARENT = """
import multiprocessing, os, sys, time
from vllm_dllm.parents import end_with_parent

def child(path):
    end_with_parent()
    end_with_parent()  # repeatable
    with open(path, "w") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(10**6)

if __name__ == "__main__":
    end_with_parent()  # of nobody
    context = multiprocessing.get_context(sys.argv[1])
    context.Process(target=child, args=(sys.argv[2],)).start()
    time.sleep(10**6)
"""


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    for method in ("spawn", "fork"):
        note = tmp_path / method
        parent = subprocess.Popen([sys.executable, str(program), method, str(note)])
        wait_for(lambda note=note: note.exists() and note.read_text().endswith("\n"))
        child = int(note.read_text())
        assert is_running(child) and is_running(parent.pid)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        wait_for(lambda child=child: not is_running(child))

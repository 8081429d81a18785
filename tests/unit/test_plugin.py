"""The plugin as vLLM meets it: by its entry point, in every process, more than once."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest
import vllm
from vllm import ModelRegistry

from vllm_dllm import plugin

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
def registered() -> Iterator[None]:
    """Leaves the process as `register` makes it, whatever a test did."""
    yield
    plugin.register()


def test_entry_point() -> None:
    (entry_point,) = entry_points(group="vllm.general_plugins", name="vllm_dllm")
    assert entry_point.load() is plugin.register


def test_vllm_loads_it_and_shows_its_log() -> None:
    """vLLM swallows errors of plugins and would go on without us."""
    env = {**os.environ, "VLLM_PLUGINS": "vllm_dllm", "VLLM_LOGGING_LEVEL": "INFO"}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS], env=env, capture_output=True, text=True
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "registered vllm_dllm.models.diffusion_gemma" in done.stdout, output
    assert "Failed to load plugin" not in output
    (line,) = [line for line in output.splitlines() if "hello from the extension" in line]
    assert "INFO" in line  # vLLM's format


def test_register_is_repeatable(registered: None) -> None:
    plugin.register()
    plugin.register()
    model = ModelRegistry.models["DiffusionGemmaForBlockDiffusion"]
    assert model.module_name == "vllm_dllm.models.diffusion_gemma"
    assert logging.getLogger("vllm_dllm").parent is logging.getLogger("vllm")


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0+cpu", "dev"])
def test_another_vllm_is_refused_with_the_supported_versions(
    version: str, registered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints = []
    monkeypatch.setattr(plugin.logger, "error", complaints.append)
    monkeypatch.setattr(vllm, "__version__", version)
    plugin.register()
    (complaint,) = complaints
    assert "vLLM 0.32.*" in complaint and version in complaint
    # Asking for one of our models says so again, instead of serving vLLM's own version of it.
    with pytest.raises(RuntimeError, match=r"supports vLLM 0\.32\.\*"):
        ModelRegistry.models["DiffusionGemmaForBlockDiffusion"].load_model_cls()

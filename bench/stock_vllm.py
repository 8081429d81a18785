"""Baseline: stock vLLM's own DiffusionGemma: its model, sampler and scheduler.

Stock vLLM cannot run it on a CPU: model runner v2 needs Triton, and so does the attention backend
that it picks. A plugin (`stock_plugin.py`) takes the place of this project's and lends it what a
CPU needs and nothing else: our native versions of the runner's kernels, and vLLM's own CPU
attention. In Triton's interpreter these kernels ran at about a fifth of the speed.

Its model file also imports Gemma4's image processor, and with it torchvision, whose builds break on
CPU torch and which this project therefore does not install. A stand-in of empty modules takes its
place: no image is ever processed (`language_model_only`).
"""

import os
import sys
import tempfile
from pathlib import Path

from bench import system
from bench.engine import CanvasEngine

PLUGIN = "stock_on_cpu"


def add_metadata(folder: Path, name: str, version: str) -> Path:
    """Makes `name` an installed distribution."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return info


TORCHVISION_MODULES = (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)
TORCHVISION_MODULE = """
from unittest.mock import MagicMock


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
"""


def install_stand_in_torchvision(folder: Path) -> None:
    for name in TORCHVISION_MODULES:
        package = folder / name.replace(".", "/")
        package.mkdir()
        (package / "__init__.py").write_text(TORCHVISION_MODULE)
    add_metadata(folder, "torchvision", "0.28.0")


def install_plugin(folder: Path) -> None:
    info = add_metadata(folder, PLUGIN, "0.0")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{PLUGIN} = bench.stock_plugin:register\n"
    )


def set_environment(folder: Path) -> None:
    """For this process and those it starts."""
    install_plugin(folder)
    install_stand_in_torchvision(folder)
    os.environ["VLLM_PLUGINS"] = PLUGIN
    paths = [str(folder), str(system.ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, str(folder))


class StockEngine(CanvasEngine):
    def __init__(self, checkpoint: str, canvas_length: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        set_environment(Path(self._folder.name))
        super().__init__(checkpoint, canvas_length, language_model_only=True)

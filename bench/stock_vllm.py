"""Baseline: stock vLLM's own DiffusionGemma, its Triton kernels in Triton's interpreter.

Stock vLLM needs Triton for it, and no Triton compiler for CPUs is to be had as a package. Three
things make it run all the same; none of them touches its code or its numbers:

- no plugins are loaded, so this project is not in the process;
- TRITON_INTERPRET=1;
- a stand-in Triton backend named `cpu`, in a temporary folder, makes vLLM see Triton. The
  interpreter never asks it to compile anything.

Its model file also imports Gemma4's image processor, and with it torchvision, whose builds break on
CPU torch and which this project therefore does not install. A stand-in of empty modules takes its
place: no image is ever processed (`language_model_only`).
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import system
from bench.engine import Engine

BACKEND_COMPILER = '''
from triton.backends.compiler import BaseBackend


class CPUBackend(BaseBackend):
    """Compiles nothing: kernels run in the interpreter."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "stand-in"

    def parse_options(self, *_):
        raise RuntimeError("The stand-in backend compiles nothing; TRITON_INTERPRET=1 is missing.")

    add_stages = load_dialects = get_module_map = parse_options
'''

BACKEND_DRIVER = """
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):
    @classmethod
    def is_active(cls):
        return not torch.cuda.is_available()

    def map_python_to_cpp_type(self, *_):
        raise RuntimeError("The stand-in backend launches nothing; TRITON_INTERPRET=1 is missing.")

    get_benchmarker = map_python_to_cpp_type

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        return torch.device("cpu")
"""


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


def install_stand_in_backend(folder: Path) -> None:
    """Lays out an installed distribution that Triton finds by its entry point."""
    package = folder / "stand_in_triton_cpu"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "compiler.py").write_text(BACKEND_COMPILER)
    (package / "driver.py").write_text(BACKEND_DRIVER)
    info = add_metadata(folder, "stand_in_triton_cpu", "0.0")
    (info / "entry_points.txt").write_text("[triton.backends]\ncpu = stand_in_triton_cpu\n")


def set_environment(folder: Path) -> None:
    """For this process and those it starts."""
    install_stand_in_backend(folder)
    install_stand_in_torchvision(folder)
    os.environ["VLLM_PLUGINS"] = ""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(folder), os.environ.get("PYTHONPATH")])
    )
    sys.path.insert(0, str(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--canvas-length", type=int, required=True)
    args = parser.parse_args()

    def start() -> tuple[dict[str, Any], Any]:
        engine = Engine(args.checkpoint, args.canvas_length, language_model_only=True)
        return {"system": "stock vLLM"}, engine.handlers()

    with tempfile.TemporaryDirectory() as folder:
        set_environment(Path(folder))
        system.serve(start)


if __name__ == "__main__":
    main()

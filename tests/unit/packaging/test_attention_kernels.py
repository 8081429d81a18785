"""attention_kernels by itself: a wheel that wants PyTorch and Triton, and runs without vLLM."""

import shutil
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.processes import output_of

PACKAGE = ROOT / "attention_kernels"

# What a PyTorch program would do, and what it must not import.
PROGRAM = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "vllm_dllm"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refused())
import torch
from attention_kernels import chunks, masks, support, tiling
from attention_kernels.api import attention
from attention_kernels.testing import PagedBatch, Request, allowed

requests = [Request(8, 37), Request(8, 37, symmetric=True), Request(5, 3, causal=True)]
batch = PagedBatch.random(requests, num_heads=4, num_kv_heads=2, head_size=32, block_size=16)
right = allowed(batch, scale=0.3, window_left=11)
for impl in ("reference", "triton"):
    right.check(attention(**batch.arguments(), scale=0.3, window_left=11, impl=impl))
print(masks.__file__)
"""


def run(*command: object, **environment: str) -> str:
    return output_of(*command, variables=environment, cwd="/")  # not where the sources are


def project(path: Path) -> dict[str, Any]:
    return tomllib.loads((path / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build leaves its files where it was started."""
    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(PACKAGE, folder / "attention_kernels")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--wheel-dir", folder, source)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_has_all_modules_and_wants_pytorch_and_triton_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
    modules = {name for name in names if ".dist-info/" not in name}
    files = [*PACKAGE.glob("*.py"), PACKAGE / "py.typed"]
    assert modules == {f"attention_kernels/{path.name}" for path in files}
    requires = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert requires == ["torch>=2.13", "triton"]


@pytest.mark.slow
def test_wheel_runs_without_vllm(wheel: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet")
    run(*pip, "--target", tmp_path, wheel)
    output = run(
        *(sys.executable, "-P", "-c", PROGRAM), PYTHONPATH=str(tmp_path), TRITON_INTERPRET="1"
    )
    assert Path(output.strip().splitlines()[-1]) == tmp_path / "attention_kernels" / "masks.py"


def test_tells_the_story_of_vllm_dllm() -> None:
    own, whole = project(PACKAGE), project(ROOT)
    for key in ("version", "requires-python", "license"):
        assert own[key] == whole[key], key
    assert own["dependencies"][0] in whole["dependencies"]
    assert own["optional-dependencies"]["fa4"] == whole["optional-dependencies"]["fa4"]

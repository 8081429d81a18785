"""The wheel, installed where there is no clone, serves a request.

`pip install` would download 1 GB. So the environment borrows the packages of this one, without this
project, and gets the two things that pip leaves wrong on a CPU: there is no distribution named
`vllm`, and torchvision cannot be imported.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from checkpoints.recipes.tasks import SERVING_NOTE
from tests.documented import WHEEL
from tests.paths import ROOT
from tests.processes import output_of

MADE_FROM = (
    *("LICENSE", "README.md", "pyproject.toml"),
    *("attention_kernels", "checkpoints", "vllm_dllm"),
)
BORROWED = re.compile(r"(?!vllm_dllm|__editable__|vllm-|torchvision).*(?<!\.pth)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make wheel` builds it, from a copy: a build leaves its files where it was started."""
    source = tmp_path_factory.mktemp("source")
    for name in MADE_FROM:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True)
        else:
            shutil.copy(path, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", "dist", "."], cwd=source, check=True)
    return source / "dist" / WHEEL


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of the wheel's environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if BORROWED.fullmatch(path.name):
            (site / path.name).symlink_to(path)
    broken = site / "torchvision"
    broken.mkdir()
    (broken / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    info = site / "torchvision-0.28.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    command = [*pip, "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(command, env=outside(), check=True)
    return folder / "bin"


def outside() -> dict[str, str]:
    """The environment variables of programs that see no clone."""
    return {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    return output_of(*command, cwd=cwd, env=outside() | variables)


def test_command_without_its_script(programs: Path, tmp_path: Path) -> None:
    folder = run(programs / "python", "-m", "vllm_dllm", "checkpoint", cwd=tmp_path)
    assert folder == run(programs / "vllm-dllm", "checkpoint", cwd=tmp_path)
    names = {path.name for path in Path(folder.strip()).iterdir()}
    assert programs.parent in Path(folder.strip()).parents
    assert {"chat_template.jinja", "config.json", "generation_config.json"} <= names
    assert {"model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names


def test_demo_serves_the_checkpoint_of_the_wheel(programs: Path, tmp_path: Path) -> None:
    """Each step is shown, in order, and drawn. And its server's log ends as it should: nothing is
    said that misleads."""
    asked = ("--ask", "Sort: q d x a", "--save-picture", "canvas.svg")
    # A short path: sockets are there, too.
    with TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        demo = pool.submit(run, programs / "vllm-dllm", "demo", *asked, cwd=tmp_path, TMPDIR=folder)
        while not (logs := list(Path(folder).glob("vllm-dllm-demo-*/server.log"))):
            assert not demo.done(), demo.result()
            time.sleep(0.1)
        log = Path(folder, "kept.log")
        log.hardlink_to(logs[0])  # the demo deletes it after a good run
        output, said = demo.result(), log.read_text()
    assert "Sort: q d x a" in output
    assert output.count("a d q x") >= 2  # the step that finishes the canvas, and the answer
    shown = [int(n) for n in re.findall(r"^canvas 1  step +(\d+)  ", output, re.MULTILINE)]
    assert shown == list(range(1, len(shown) + 1))
    assert f"\n{len(shown)} steps on 1 canvas, " in output
    assert "<svg" in (tmp_path / "canvas.svg").read_text()
    assert SERVING_NOTE in output
    assert "Application shutdown complete" in said
    assert SERVING_NOTE in said
    assert "torchvision (operator torchvision::nms does not exist)" in said
    for misleading in ("nanobind", "Triton is installed", "Triton is not installed"):
        assert misleading not in said

